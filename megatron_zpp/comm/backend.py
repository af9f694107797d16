"""The collectives that lanes use: those of torch.distributed (NCCL, gloo), or a world whose ranks are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.parallel.gathers import all_gather, gather_levels
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import WorldGroups
from megatron_zpp.parallel.islands import ranks_of_columns, ranks_of_islands
from megatron_zpp.parallel.topology import Lane, Link


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Waits for the end and raises its error, if any. On CUDA only the current stream waits."""

    def when_ended(self, call: Callable[[], None]) -> None:
        """Calls `call` when the collective has ended, on any thread; at once if it has ended already."""


class WorldGather(Protocol):
    """What exchanges a few numbers among all ranks of a world."""

    rank: int

    def gather_world(self, own: Tensor) -> Tensor:
        """[data ranks, tensor ranks, numel]: `own` [numel] of every rank. Every rank must call it, and waits."""


class Backend(WorldGather, Protocol):
    """The collectives of one rank. Lane collectives are asynchronous and never block the caller.

    They return None if there is nothing to wait for: they run in the current stream of a device, in turn with what is enqueued there.
    """

    grid: Grid

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        """Fills output [members * numel] with `own` [numel] of every member of the lane, in member order; uint8 on both sides."""

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        """Sends the i-th equal part of `sent` to member i, and fills `output` with the parts for this rank, in member order; both uint8."""


class TorchWork:
    """A collective of torch.distributed under way."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def when_ended(self, call: Callable[[], None]) -> None:
        self._work.get_future().add_done_callback(lambda future: call())


class TorchBackend:
    """The collectives of torch.distributed. Each lane has its own process group.

    world: the groups in which all ranks of the grid gather numbers; by default that of all ranks of torch.distributed.

    On CUDA a collective runs in the current stream. With async_op=True, NCCL would run it in one more stream per group; a device has few
    queues for streams, and kernels of two streams in one queue wait for each other.
    """

    def __init__(self, grid: Grid, rank: int, groups: Mapping[Lane, dist.ProcessGroup], world: WorldGroups = WorldGroups()) -> None:
        self.grid = grid
        self.rank = rank
        self._groups = groups
        self._world = world

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        work = all_gather(output, own, group=self._groups[lane], async_op=not output.is_cuda)
        return None if work is None else TorchWork(work)

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        work = dist.all_to_all_single(output, sent, group=self._groups[lane], async_op=not output.is_cuda)
        return None if work is None else TorchWork(work)

    def gather_world(self, own: Tensor) -> Tensor:
        if self.grid.world_size == 1:
            return own.detach().clone().view(1, 1, -1)
        with naming("a few numbers of every rank"):
            rows = gather_levels(own, self._world)
        return rows.view(self.grid.data_ranks, self.grid.tensor_ranks, -1)


class CollectiveError(RuntimeError):
    """A collective has failed."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Adds `what` a collective carried, and the likely causes, to the text of its error. torch's own text has neither."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"{what}: the collective failed, because a rank or its link is gone, or slower than the timeout "
            "(--distributed-timeout-minutes, or that of shard()), or ranks made different calls, such as an evaluation within "
            f"`if rank == 0:`: {error}"
        ) from error


Part = TypeVar("Part")


class VirtualWorld:
    """A world whose ranks are threads of this process. A collective ends when its last member has posted its part."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._lock = threading.Condition()
        self._rounds: dict[tuple[object, ...], _Round] = {}
        self._failure: BaseException | None = None

    def backend_of(self, rank: int) -> VirtualBackend:
        return VirtualBackend(self, rank)

    def run(self, program: Callable[[VirtualBackend], Any]) -> list[Any]:
        """Results of `program` on each rank, in rank order. An error on one rank ends all ranks and is raised here."""
        world_size = self.grid.world_size
        results: list[Any] = [None] * world_size
        threads = [threading.Thread(target=self._run_rank, args=(program, rank, results)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def _run_rank(self, program: Callable[[VirtualBackend], Any], rank: int, results: list[Any]) -> None:
        try:
            results[rank] = program(self.backend_of(rank))
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
                rounds = list(self._rounds.values())
                self._lock.notify_all()
            for this_round in rounds:
                this_round.call_back()

    def post(self, key: tuple[object, ...], member: int, part: Part, members: int, deliver: Callable[[list[Part]], None]) -> VirtualWork:
        """Posts one member's part. The last member to post delivers the parts, which are in member order, to all members."""
        with self._lock:
            this_round = self._rounds.setdefault(key, _Round())
            this_round.parts[member] = part
            is_last = len(this_round.parts) == members
            if is_last:
                deliver([this_round.parts[index] for index in range(members)])
                this_round.is_complete = True
                this_round.parts.clear()  # a rank that has not waited yet would hold what others have sent and received
                del self._rounds[key]
                self._lock.notify_all()
        if is_last:
            this_round.call_back()
        return VirtualWork(self, this_round)

    def wait_for(self, this_round: _Round) -> None:
        with self._lock:
            self._lock.wait_for(lambda: this_round.is_complete or self._failure is not None)
            if not this_round.is_complete:
                raise RuntimeError("another rank of the virtual world failed") from self._failure

    def when_ended(self, this_round: _Round, call: Callable[[], None]) -> None:
        with self._lock:
            has_ended = this_round.is_complete or self._failure is not None
            if not has_ended:
                this_round.calls.append(call)
        if has_ended:
            call()


@dataclass
class _Part:
    output: Tensor
    sent: Tensor


@dataclass
class _Round:
    parts: dict[int, Any] = field(default_factory=dict)
    is_complete: bool = False
    calls: list[Callable[[], None]] = field(default_factory=list)

    def call_back(self) -> None:
        for call in self.calls:
            call()


class VirtualWork:
    """One rank's view of a round."""

    def __init__(self, world: VirtualWorld, this_round: _Round) -> None:
        self._world = world
        self._round = this_round

    def wait(self) -> None:
        self._world.wait_for(self._round)

    def when_ended(self, call: Callable[[], None]) -> None:
        self._world.when_ended(self._round, call)


class VirtualBackend:
    """The collectives of one rank of a virtual world, or of a part of one."""

    def __init__(self, world: VirtualWorld, rank: int, grid: Grid | None = None, part: tuple[int, ...] = ()) -> None:
        """grid, part: of a part, the arrangement of its ranks, and which ranks of the world they are."""
        self.grid = grid or world.grid
        self.rank = rank
        self.world = world
        self.serves_engine = False  # a second engine would get messages of the first
        self._part = part
        self._sequence: dict[object, int] = {}
        self._members = {link: self.grid.members(link, self.rank) for link in Link}

    def part(self, grid: Grid, ranks: Sequence[int]) -> VirtualBackend:
        """The backend of this rank in a world of `ranks` alone, arranged as `grid` says. No other part may have the same ranks."""
        return VirtualBackend(self.world, ranks.index(self.rank), grid, tuple(ranks))

    def on_islands(self, islands: int) -> tuple[VirtualBackend, VirtualBackend]:
        """The backend of this rank among those of its island, and among those that have its place on each, where every island is a node."""
        world_size = self.grid.world_size
        island, place = divmod(self.rank, world_size // islands)
        of_island, column = ranks_of_islands(world_size, islands)[island], ranks_of_columns(world_size, islands)[place]
        return self.part(Grid.of_nodes(1, len(of_island)), of_island), self.part(Grid.of_nodes(islands, 1), column)

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work:
        members = self._members[lane.link]
        return self._post((lane, members), members.index(self.rank), _Part(output, own), len(members), _deliver_gather)

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work:
        members = self._members[lane.link]
        return self._post((lane, members), members.index(self.rank), _Part(output, sent), len(members), _deliver_exchange)

    def gather_world(self, own: Tensor) -> Tensor:
        world_size = self.grid.world_size
        output = own.new_empty(world_size * own.numel())
        self._post("world", self.rank, _Part(output, own.contiguous()), world_size, _deliver_gather).wait()
        return output.view(self.grid.data_ranks, self.grid.tensor_ranks, -1)

    def _post(self, group: object, member: int, part: _Part, members: int, deliver: Callable[[list[_Part]], None]) -> Work:
        sequence = self._sequence.get(group, 0)
        self._sequence[group] = sequence + 1
        return self.world.post((self._part, group, sequence), member, part, members, deliver)


def _deliver_gather(parts: list[_Part]) -> None:
    _check_sizes(parts, [len(parts) * part.sent.numel() for part in parts])
    for part in parts:
        torch.cat([other.sent.flatten() for other in parts], out=part.output.view(-1))


def _deliver_exchange(parts: list[_Part]) -> None:
    _check_sizes(parts, [part.sent.numel() for part in parts])
    for member, part in enumerate(parts):
        torch.cat([other.sent.view(len(parts), -1)[member] for other in parts], out=part.output.view(-1))


def _check_sizes(parts: list[_Part], expected: list[int]) -> None:
    outputs = [part.output.numel() for part in parts]
    if len({*outputs, *expected}) > 1:
        raise RuntimeError(f"the members of a collective have messages of different sizes: outputs of {outputs}, parts for {expected}")
