"""Virtual worlds whose ranks share one GPU of the model machine: accesses of different ranks need an order, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from harness.fake_streams.accesses import Accesses, Block, RaceError, watched_memory
from harness.fake_streams.machine import FakeStream, Machine, Site
from harness.worlds import run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.lanes import StreamLanes
from megatron_zpp.parallel.grid import Grid
from testbed.session import RankPlace
from testbed.thread_ranks import EventBackend

Result = TypeVar("Result")


def run_on_one_fake_gpu(
    grid: Grid, program: Callable[[RankPlace, Machine], Result], *, without: Site | None = None
) -> tuple[list[Result], set[Site]]:
    """What `program` returns on each rank, and the lines whose waits or events ordered anything.

    without: a line that has no effect (Machine). Raises RaceError if two accesses have no order, and if the host has not waited for all
    work of a rank when its program ends.
    """
    streams: list[FakeStream] = []
    blocks: dict[int, Block] = {}
    machines: list[Machine] = []

    def on_gpu(backend: VirtualBackend) -> Result:
        machine = Machine(without, streams)
        machines.append(machine)
        place = RankPlace(EventBackend(backend.world, backend.rank, machine), StreamLanes(machine), torch.device("cpu"), machine)
        with Accesses(machine, blocks):
            result = program(place, machine)
            if machine.unfinished():
                raise RaceError(f"the ranks end while {', '.join(machine.unfinished())} may still work")
        return result

    with watched_memory():
        results = run_world(grid, on_gpu)
    return results, set().union(*(machine.needed for machine in machines))
