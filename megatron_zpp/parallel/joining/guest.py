"""The side of every rank but 0 in joining: it reads the invitation of its own job, and claims its number."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from megatron_zpp.parallel.failures.question import pauses
from megatron_zpp.parallel.joining.gathering import (
    BEGUN,
    CLAIMS,
    GIVEN_UP,
    GREETINGS,
    INVITATION,
    READERS,
    REFUSED,
    answer_key,
    claim_key,
    greeting_key,
    refused_key,
)
from megatron_zpp.parallel.joining.member import Invitation, Member, decoded_invitation, decoded_member, encoded
from megatron_zpp.parallel.joining.other_job import other_job
from megatron_zpp.parallel.joining.place import JoinError, Place

MOST_CHARACTERS = 2000


class Guest:
    """A rank that joins. tell: gets what it waits for, whenever the store has answered.

    asks: whether the store may hold invitations of earlier starts, as one that torchrun keeps, so that only an answer counts.
    """

    def __init__(self, store: dist.Store, place: Place, member: Member, tell: Callable[[str], None], *, asks: bool) -> None:
        self._store = store
        self._place = place
        self._me = member
        self._tell = tell
        self._asks = asks

    def take_part(self) -> str:
        """The name of the part of the store, once every rank has joined; waits without a limit.

        Raises JoinError if the invitation is of another job, if another process has claimed the same rank, and if rank 0 gives up.
        """
        invitation = self._invited()
        part = dist.PrefixStore(invitation.part, self._store)
        self._claim(part)
        for pause in pauses():
            if part.check([BEGUN]):
                break
            self._tell(f"{invitation.rank_0} is rank 0, but not all of {self._me.world_size} ranks have come")
            if part.check([GIVEN_UP]):
                why = part.get(GIVEN_UP)[:MOST_CHARACTERS].decode(errors="replace")
                part.add(READERS, 1)
                raise JoinError(f"rank {self._me.rank} has joined in vain: {why}")
            time.sleep(pause)
        return invitation.part

    def _invited(self) -> Invitation:
        key = self._greet() if self._asks else INVITATION
        for pause in pauses():
            if self._store.check([key]):
                break
            self._tell("a store is there, but rank 0 has not come")
            if self._asks and self._store.check([INVITATION]):
                self._check_job(decoded_invitation(self._store.get(INVITATION)).rank_0)
            time.sleep(pause)
        invitation = decoded_invitation(self._store.get(key))
        self._check_job(invitation.rank_0)
        if invitation.rank_0.world_size != self._me.world_size:
            raise JoinError(other_job(self._me, invitation.rank_0, self._place))
        return invitation

    def _greet(self) -> str:
        word = uuid.uuid4().hex
        self._store.set(greeting_key(self._store.add(GREETINGS, 1) - 1), word)
        return answer_key(word)

    def _check_job(self, rank_0: Member) -> None:
        if rank_0.job.differ_from(self._me.job):
            raise JoinError(other_job(self._me, rank_0, self._place))

    def _claim(self, part: dist.Store) -> None:
        own = encoded(self._me)
        found = part.compare_set(claim_key(self._me.rank), "", own)
        if found != own.encode():
            part.set(refused_key(self._me.rank), own)
            part.add(REFUSED, 1)
            raise JoinError(
                f"rank {self._me.rank} of {self._me.world_size} at {self._place} was claimed by {decoded_member(found)} before {self._me}; "
                "give every process its own RANK, or choose another MASTER_PORT if they belong to two runs"
            )
        part.add(CLAIMS, 1)
