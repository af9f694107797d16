"""Virtual worlds whose ranks have a GPU of the model machine each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from harness.fake_streams.accesses import Accesses, RaceError, watched_memory
from harness.fake_streams.machine import Machine, Site
from harness.fake_streams.nccl import FakeNccl
from harness.worlds import run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.lanes import StreamLanes
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Lane

Result = TypeVar("Result")


@dataclass(frozen=True)
class Gpu:
    """What a rank needs to train on its machine."""

    machine: Machine
    accesses: Accesses
    backend: FakeNccl
    lanes: StreamLanes


def run_on_gpus(
    shape: tuple[int, int] | Grid,
    program: Callable[[Gpu], Result],
    *,
    without: Site | None = None,
    times: Mapping[Lane, float] | None = None,
) -> list[Result]:
    """What `program` returns on each rank.

    without: a line that has no effect (Machine). times: of the collectives of each lane.
    Raises RaceError if two accesses have no order, and if the host has not waited for all work when the program ends: the process groups
    are destroyed then.
    """

    def on_gpu(backend: VirtualBackend) -> Result:
        machine = Machine(without)
        with Accesses(machine) as accesses:
            gpu = Gpu(machine, accesses, FakeNccl(backend, accesses, times or {}), StreamLanes(machine))
            result = program(gpu)
            if machine.unfinished():
                raise RaceError(f"the process groups end while {', '.join(machine.unfinished())} may still use them")
        return result

    with watched_memory():
        return run_world(shape, on_gpu)
