"""Members of a run that is not there: threads of a few processes that join through the real store, then live and wait as ranks do."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.gpu.rank_processes import free_ports
from benchmarks.scale_study.counted_store import CountedStore
from megatron_zpp.parallel.failures.failure_board import FailureBoard
from megatron_zpp.parallel.failures.pulse import Pulse
from megatron_zpp.parallel.joining.gathering import Gathering, new_invitation
from megatron_zpp.parallel.joining.guest import Guest
from megatron_zpp.parallel.joining.member import Member
from megatron_zpp.parallel.joining.place import Place
from megatron_zpp.parallel.joining.store import connected_store, held_store, reached_store
from megatron_zpp.parallel.launch import Launch

MEMBERS = (64, 512, 4096)
LATE_SECONDS = 30.0
PROCESSES = 4
TIMEOUT = timedelta(minutes=10)
WAITED_SECONDS = 10.0  # for others, after all have joined
CHECK_SECONDS = 0.5  # between two looks of a rank that waits
LONGEST_SECONDS = 1200.0
STACK_BYTES = 256 * 1024  # of a thread


@dataclass(frozen=True)
class Joining:
    """Operations of the store until all have joined: of a member, by the median and the most of all but rank 0; and of rank 0.

    late_seconds: after the others, the last member begins to join. seconds: until the last has joined. per_second: operations of a member
    that has joined and waits for others.
    """

    members: int
    late_seconds: float
    seconds: float
    of_member: float
    most_of_member: int
    of_rank_0: int
    per_second: float


@dataclass(frozen=True)
class _Lived:
    rank: int
    ended: float
    joining: int
    waiting: int


def answered(processes: Sequence[BaseProcess], answers: Any) -> list[Any]:
    """One answer of each process. Raises queue.Empty, and ends them, if one does not answer."""
    try:
        return [answers.get(timeout=LONGEST_SECONDS) for _ in processes]
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()


def measure() -> list[Joining]:
    return [measured(members, LATE_SECONDS) for members in MEMBERS]


def measured(members: int, late_seconds: float) -> Joining:
    context = multiprocessing.get_context("spawn")
    port = free_ports(1)[0]
    answers: Any = context.Queue()
    have_lived = context.Barrier(PROCESSES)  # the store is in the process of rank 0
    begun = time.monotonic()
    processes = [
        context.Process(target=_process, args=(range(first, members, PROCESSES), members, port, late_seconds, have_lived, answers))
        for first in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    lived: list[_Lived] = [one for answer in answered(processes, answers) for one in answer]
    others = [one for one in lived if one.rank > 0]
    return Joining(
        members=members,
        late_seconds=late_seconds,
        seconds=max(one.ended for one in lived) - begun,
        of_member=statistics.median(one.joining for one in others),
        most_of_member=max(one.joining for one in others),
        of_rank_0=next(one.joining for one in lived if one.rank == 0),
        per_second=statistics.median(one.waiting for one in lived) / WAITED_SECONDS,
    )


def _process(ranks: Sequence[int], members: int, port: int, late_seconds: float, have_lived: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    threading.stack_size(STACK_BYTES)
    place, stores = Place("127.0.0.1", port), list[CountedStore]()

    def live(rank: int) -> _Lived:
        if rank == members - 1:
            time.sleep(late_seconds)
        store, part = _join(Launch(rank, members, rank, members, place.host, port), place)
        ended, joining = time.monotonic(), store.operations
        stores.append(store)
        reports = CountedStore(dist.PrefixStore(part, connected_store(place.host, port, TIMEOUT)))
        board = FailureBoard(reports, rank, members)
        pulse = Pulse(reports, rank, TIMEOUT.total_seconds(), lambda: None)
        while time.monotonic() < ended + WAITED_SECONDS:
            board.check()
            time.sleep(CHECK_SECONDS)
        waiting = reports.operations
        pulse.stop()
        return _Lived(rank, ended, joining, waiting)

    with ThreadPoolExecutor(len(ranks)) as pool:
        lived = list(pool.map(live, ranks))
    have_lived.wait()
    answers.put(lived)


def _join(launch: Launch, place: Place) -> tuple[CountedStore, str]:
    """The store and this start's part of it, as join.join finds them."""
    member = Member.this_process(launch)
    if launch.rank > 0:
        store = CountedStore(reached_store(place, TIMEOUT, lambda _: None)[0])
        return store, Guest(store, place, member, lambda _: None, asks=False).take_part()
    invitation = new_invitation(member)
    store = CountedStore(held_store(place, invitation, TIMEOUT))
    Gathering(store, place, invitation, answers=False).wait(TIMEOUT.total_seconds(), time.monotonic())
    return store, invitation.part
