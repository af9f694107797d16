"""Brings the ranks of one start together in a store, and refuses ranks of other jobs. Whatever prevents it is one sentence.

Rank 0 invites the others to a part of the store with a name of its own, and every rank claims its number there:

    rank 0   invitation = {part: PART, rank_0: member}             PART/begun once every rank has a claim, else PART/given up
    rank r   reads it, compares ids and world sizes                PART/claim/r = member

torchrun keeps the store when it restarts its ranks. Entries of dead ranks, above all their addresses, would be mistaken for those of living
ranks, and rank r might read the invitation of an earlier rank 0. So there it asks for an answer:

    rank r   greeting/NUMBER = WORD                                waits for answer/WORD
    rank 0   answer/WORD = invitation                              for every greeting, also those of earlier ranks, which nobody reads
"""

from __future__ import annotations

import ipaddress
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_zpp.parallel.failures.failure_board import Keeper
from megatron_zpp.parallel.failures.question import NoAnswer, answer_within
from megatron_zpp.parallel.joining.gathering import Gathering, new_invitation
from megatron_zpp.parallel.joining.guest import Guest
from megatron_zpp.parallel.joining.interface import interface_to_others
from megatron_zpp.parallel.joining.member import ForeignEntry, Member
from megatron_zpp.parallel.joining.place import JoinError, Place
from megatron_zpp.parallel.joining.store import HERE, connected_store, held_store, reached_store
from megatron_zpp.parallel.launch import Launch

MOST_SECONDS = 600.0  # a rank waits no longer for the others, however long a collective may take
SILENT_SECONDS = 10.0  # after which a sentence says that what answered before does not answer any more
RANK_0_SHARE = 0.9  # of its time, after which rank 0 gives up, so that the others can read from it who is missing


@dataclass(frozen=True)
class Joined:
    """The stores of a rank that has joined.

    kept: outlasts the ranks if torchrun restarts them. part: belongs to this start. reports: the same part over a connection of its own,
    because a wait on one connection holds up all other requests on it. keeper: of the store; None if there is only this process.
    interface: to the ranks of other nodes; empty if there are none, or if it is not known.
    """

    kept: dist.Store
    part: dist.Store
    reports: dist.Store
    keeper: Keeper | None = None
    interface: str = ""


def join(launch: Launch, timeout: timedelta) -> Joined:
    """The store of this start, once every rank has joined; every rank must call it. A single rank needs no other process.

    Raises JoinError if a rank is missing after the timeout, or MOST_SECONDS if that is less, and if another job is met.
    """
    if launch.world_size == 1 and not launch.torchrun_holds_store:
        alone = dist.HashStore()
        return Joined(alone, alone, alone)
    if launch.master_address is None:
        raise JoinError("MASTER_ADDR is not set: start with torchrun, or export MASTER_ADDR (the host of rank 0) and MASTER_PORT")
    attempt = _Attempt(launch, Place(launch.master_address, launch.master_port), min(timeout.total_seconds(), MOST_SECONDS))
    try:
        return answer_within(attempt.limit_seconds, attempt.run)
    except NoAnswer:
        raise JoinError(attempt.given_up()) from None
    except ForeignEntry as error:
        raise JoinError(f"at {attempt.place} is another program ({error}); choose another MASTER_PORT") from None
    except RuntimeError as error:
        raise JoinError(attempt.broken_off(error)) from None


class _Attempt:
    """One rank's attempt to join."""

    def __init__(self, launch: Launch, place: Place, limit_seconds: float) -> None:
        self.place = place
        self.limit_seconds = limit_seconds
        self._started = self._told = time.monotonic()
        self._launch = launch
        self._me = Member.this_process(launch)
        self._finding = "its name is being looked up"
        # Longer than this rank waits: torch would print a message of its own when it is over.
        self._store_timeout = timedelta(seconds=2 * limit_seconds + 60)

    def run(self) -> Joined:
        """Joins; rank 0 gives up after its share of the time."""
        is_rank_0, asks = self._launch.rank == 0, self._launch.torchrun_holds_store
        invitation = new_invitation(self._me)
        if is_rank_0 and not asks:
            self._tell("its own store does not answer")
            store, address = held_store(self.place, invitation, self._store_timeout), HERE
        else:
            store, address = reached_store(self.place, self._store_timeout, self._tell)
        second = connected_store(address, self.place.port, self._store_timeout)
        if is_rank_0:
            Gathering(store, self.place, invitation, answers=asks).wait(RANK_0_SHARE * self.limit_seconds, self._started)
            part = invitation.part
        else:
            part = Guest(store, self.place, self._me, self._tell, asks=asks).take_part()
        keeper = Keeper("torchrun" if asks else "rank 0", str(self.place))
        own = dist.PrefixStore(part, store)
        return Joined(store, own, dist.PrefixStore(part, second), keeper, self._interface(own, address))

    def _interface(self, part: dist.Store, address: str) -> str:
        """To the other nodes. address: where the store answers, HERE in the process that holds it."""
        if self._launch.local_world_size == self._launch.world_size:
            return ""
        self._tell("its ranks are looking for the network interface between nodes")
        to_rank_0 = self.place.addresses()[0] if address == HERE else address
        return interface_to_others(part, self._me.rank, self._me.world_size, to_rank_0)

    def given_up(self) -> str:
        silent_seconds = time.monotonic() - self._told
        silence = f", and has not answered for {silent_seconds:.0f} s" if silent_seconds > SILENT_SECONDS else ""
        whom = "the store of torchrun" if self._launch.torchrun_holds_store else "rank 0"
        waited = f"rank {self._me.rank} on {self._me.host} has waited {self.limit_seconds:.0f} s for {whom} at {self.place}"
        remedy = f"start rank 0 there, or correct MASTER_ADDR and MASTER_PORT{self._hint()}"
        return f"{waited}: {self._finding}{silence}; {remedy}"

    def broken_off(self, error: RuntimeError) -> str:
        whom = "torchrun" if self._launch.torchrun_holds_store else "rank 0"
        return f"rank {self._me.rank} was joining, when {whom} at {self.place} ended ({self._finding}): {str(error).splitlines()[0]}"

    def _tell(self, finding: str) -> None:
        self._finding, self._told = finding, time.monotonic()

    def _hint(self) -> str:
        """For a run of several hosts, each of which takes the address for its own."""
        has_one_host = self._launch.local_world_size in (None, self._launch.world_size)
        try:
            is_loopback = self.place.host == "localhost" or ipaddress.ip_address(self.place.host).is_loopback
        except ValueError:
            is_loopback = False
        return "; that address means every host itself, so other hosts do not find rank 0" if is_loopback and not has_one_host else ""
