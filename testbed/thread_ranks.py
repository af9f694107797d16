"""Ranks as threads of one process that share one device: each has streams of its own, and events order what crosses from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_zpp.comm.backend import VirtualWorld, Work
from megatron_zpp.comm.lanes import StreamLanes, make_lanes
from megatron_zpp.comm.streams import CudaStreams, Streams
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Lane
from testbed.session import RankPlace

Result = TypeVar("Result")


@dataclass
class _Posted:
    """What one member of a collective shows the others. all: those of all members, once they have come."""

    sent: Tensor | None
    event: Any
    all: Sequence[_Posted] = field(default=(), repr=False)


class EventBackend:
    """The collectives of one rank. Each is copies in the current stream of the rank that receives, which waits for the senders' events.

    The host waits until every member has called; so all ranks must enqueue their collectives in one order, whichever lane they are on.
    """

    def __init__(self, world: VirtualWorld, rank: int, streams: Streams) -> None:
        self.grid = world.grid
        self.rank = rank
        self._world = world
        self._streams = streams
        self._count: dict[object, int] = {}

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        members = self.grid.members(lane.link, self.rank)
        self._receive((lane, members), members, own, output.view(len(members), -1), lambda sent: sent.view(-1))
        return None

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        members = self.grid.members(lane.link, self.rank)
        place = members.index(self.rank)
        self._receive((lane, members), members, sent, output.view(len(members), -1), lambda whole: whole.view(len(members), -1)[place])
        return None

    def gather_world(self, own: Tensor) -> Tensor:
        everyone = tuple(range(self.grid.world_size))
        output = own.new_empty(self.grid.world_size, own.numel())
        self._receive("world", everyone, own.contiguous(), output, lambda sent: sent.view(-1))
        return output.view(self.grid.data_ranks, self.grid.tensor_ranks, -1)

    def _receive(self, group: object, members: Sequence[int], sent: Tensor, rows: Tensor, part: Callable[[Tensor], Tensor]) -> None:
        stream = self._streams.current()
        posted = self._meet(group, members, _Posted(sent, stream.record_event()))
        for row, other in zip(rows, posted, strict=True):
            stream.wait_event(other.event)
            if other.sent is not None:
                row.copy_(part(other.sent))
        # The senders may write to what they sent once all members have copied it.
        for other in self._meet(group, members, _Posted(None, stream.record_event())):
            stream.wait_event(other.event)

    def _meet(self, group: object, members: Sequence[int], own: _Posted) -> Sequence[_Posted]:
        count = self._count.get(group, 0)
        self._count[group] = count + 1

        def deliver(posted: list[_Posted]) -> None:
            for member in posted:
                member.all = posted

        self._world.post(("events", group, count), members.index(self.rank), own, len(members), deliver).wait()
        return own.all


def run_on_one_gpu(grid: Grid, device: torch.device, program: Callable[[RankPlace], Result]) -> list[Result]:
    """What `program` returns on each rank, a thread with a compute stream of its own. An error on one rank ends all and is raised.

    Backward runs in the thread of its rank. In the device's thread, which all ranks share, one rank would wait there for the others.
    """

    def run_rank(backend: Any) -> Result:
        streams = CudaStreams(device)
        torch.cuda.set_device(device)
        with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(torch.cuda.Stream(device)):
            place = RankPlace(EventBackend(world, backend.rank, streams), StreamLanes(streams), device, streams)
            result = program(place)
            torch.cuda.synchronize(device)
        return result

    world = VirtualWorld(grid)
    return world.run(run_rank)


def run_on_cpu(grid: Grid, device: torch.device, program: Callable[[RankPlace], Result]) -> list[Result]:
    """The same on the CPU, with a thread of lanes for each rank."""
    world = VirtualWorld(grid)
    return world.run(lambda backend: program(RankPlace(backend, make_lanes(None), device)))
