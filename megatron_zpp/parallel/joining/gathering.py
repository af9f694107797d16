"""Rank 0's side of joining: it invites the other ranks, and waits until each has claimed its number."""

from __future__ import annotations

import re
import time
import uuid
from typing import NoReturn

import torch.distributed as dist

from megatron_zpp.parallel.job_ids import JOB_VARIABLE
from megatron_zpp.parallel.joining.member import Invitation, Member, decoded_invitation, decoded_member, encoded
from megatron_zpp.parallel.joining.other_job import other_job
from megatron_zpp.parallel.joining.place import JoinError, Place
from megatron_zpp.parallel.ranks_in_words import first_of, ranks_in_words

INVITATION = "invitation"
GREETINGS = "greetings"
CLAIMS, REFUSED, BEGUN, GIVEN_UP, READERS = "claims", "refused", "begun", "given up", "readers"
POLL_SECONDS = 0.02
LOOK_SECONDS = 1.0
FAREWELL_SECONDS = 2.0  # for the others to read why rank 0 gave up
WORD = re.compile(r"[0-9a-f]{32}")


def new_invitation(member: Member) -> Invitation:
    return Invitation(uuid.uuid4().hex, member)


def claim_key(rank: int) -> str:
    return f"claim/{rank}"


def refused_key(rank: int) -> str:
    return f"refused/{rank}"


def greeting_key(number: int) -> str:
    return f"greeting/{number}"


def answer_key(word: str) -> str:
    return f"answer/{word}"


class Gathering:
    """The ranks of a start, as rank 0 sees them come. answers: whether the others have to ask, as where torchrun keeps the store."""

    def __init__(self, store: dist.Store, place: Place, invitation: Invitation, *, answers: bool) -> None:
        self._store = store
        self._place = place
        self._me = invitation.rank_0
        self._invitation = encoded(invitation)
        self._part = dist.PrefixStore(invitation.part, store)
        self._answers = answers
        self._greetings = 0
        self._unread: list[int] = []

    def wait(self, seconds: float, started: float) -> None:
        """Invites the other ranks and waits until every one has a claim. started: when rank 0 began to join, by time.monotonic.

        Raises JoinError so many seconds later, naming the missing ranks, and at once if two processes claim one rank: the first that came
        may be the one of another job.
        """
        if self._answers and self._store.check([INVITATION]):
            former = decoded_invitation(self._store.get(INVITATION)).rank_0
            if former.job.differ_from(self._me.job):
                raise JoinError(other_job(self._me, former, self._place))
        self._store.set(INVITATION, self._invitation)
        next_look, missing = time.monotonic() + LOOK_SECONDS, list(range(1, self._me.world_size))
        while self._part.add(CLAIMS, 0) < self._me.world_size - 1:
            if self._answers:
                self._answer()
            self._check_claims()
            if time.monotonic() > min(next_look, started + seconds):
                next_look = time.monotonic() + LOOK_SECONDS
                missing = [rank for rank in missing if not self._part.check([claim_key(rank)])]
                if not missing:
                    break  # one of them was lost before it could add its claim to the number of claims
                if time.monotonic() > started + seconds:
                    self._give_up(self._vain_wait(missing, seconds))
            time.sleep(POLL_SECONDS)
        self._check_claims()
        self._part.set(BEGUN, "")

    def _answer(self) -> None:
        """Answers the greetings that have come. A rank that dies has perhaps taken a number, and never writes its greeting."""
        count = self._store.add(GREETINGS, 0)
        self._unread += range(self._greetings, count)
        self._greetings = count
        for number in [number for number in self._unread if self._store.check([greeting_key(number)])]:
            word = self._store.get(greeting_key(number)).decode(errors="replace")
            if WORD.fullmatch(word):
                self._store.set(answer_key(word), self._invitation)
            self._unread.remove(number)

    def _check_claims(self) -> None:
        if self._part.add(REFUSED, 0) == 0:
            return
        for rank in range(1, self._me.world_size):
            holder, other = self._read(claim_key(rank)), self._read(refused_key(rank))
            if holder is not None and other is not None:
                twice = f"two processes claim rank {rank} of {self._me.world_size}: {holder}, and {other}"
                remedy = f"give every process its own RANK, or if they belong to two runs, another MASTER_PORT or {JOB_VARIABLE}"
                self._give_up(f"at {self._place} {twice}; {remedy}")

    def _vain_wait(self, missing: list[int], seconds: float) -> str:
        """What rank 0 says if ranks have not come."""
        joined = [rank for rank in range(self._me.world_size) if rank not in missing]
        members = [self._me, *(self._read(claim_key(rank)) for rank in joined[1:])]
        hosts = first_of(member.host for member in members if member is not None)
        return (
            f"rank 0 has waited {seconds:.0f} s at {self._place} for {ranks_in_words(missing)} of {self._me.world_size}; "
            f"{ranks_in_words(joined)} joined, on {hosts}; "
            "the output of the missing ranks says why they did not come, or they have another MASTER_ADDR, MASTER_PORT or RANK"
        )

    def _give_up(self, why: str) -> NoReturn:
        """Tells those that have joined, and raises JoinError."""
        self._part.set(GIVEN_UP, why)
        readers = self._part.add(CLAIMS, 0)
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self._part.add(READERS, 0) < readers and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        raise JoinError(why)

    def _read(self, key: str) -> Member | None:
        return decoded_member(self._part.get(key)) if self._part.check([key]) else None
