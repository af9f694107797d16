from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_zpp.comm import backend as backend_module
from megatron_zpp.comm.backend import TorchBackend, VirtualBackend, VirtualWorld
from megatron_zpp.comm.lanes import Hop, ThreadLanes
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import LANES, Direction, Lane, Link

pytestmark = pytest.mark.virtual

GRIDS = [*(Grid.of_nodes(*shape) for shape in [(1, 1), (1, 3), (3, 1), (2, 2), (3, 2), (2, 4)]), Grid(8, 4, 2, tensor_ranks=2)]


def _bytes_of(rank: int, numel: int) -> Tensor:
    return (torch.arange(numel) + 50 * rank).to(torch.uint8)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("link", list(Link))
def test_a_gather_brings_what_each_member_of_the_link_has_in_member_order(grid: Grid, link: Link) -> None:
    def program(backend: VirtualBackend) -> Tensor:
        output = torch.empty(len(grid.members(link, 0)) * 5, dtype=torch.uint8)
        backend.all_gather(Lane(link, Direction.CLIMB), output, _bytes_of(backend.rank, 5)).wait()
        return output

    for rank, output in enumerate(cast(list[Tensor], VirtualWorld(grid).run(program))):
        assert torch.equal(output, torch.cat([_bytes_of(member, 5) for member in grid.members(link, rank)]))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("link", list(Link))
def test_an_exchange_brings_from_each_member_the_piece_that_it_meant_for_this_rank(grid: Grid, link: Link) -> None:
    members = len(grid.members(link, 0))

    def program(backend: VirtualBackend) -> Tensor:
        output = torch.empty(members * 5, dtype=torch.uint8)
        backend.exchange(Lane(link, Direction.DESCEND), output, _bytes_of(backend.rank, members * 5)).wait()
        return output

    for rank, output in enumerate(cast(list[Tensor], VirtualWorld(grid).run(program))):
        own = grid.members(link, rank).index(rank)
        pieces = [_bytes_of(member, members * 5)[own * 5 : own * 5 + 5] for member in grid.members(link, rank)]
        assert torch.equal(output, torch.cat(pieces))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gather_world_is_one_row_per_data_rank_and_ladder_of_any_dtype(grid: Grid) -> None:
    results = VirtualWorld(grid).run(lambda backend: backend.gather_world(torch.tensor([backend.rank, 0.5], dtype=torch.float64)))
    expected = torch.tensor(
        [[[grid.rank_of(data_rank, links), 0.5] for links in range(grid.tensor_ranks)] for data_rank in range(grid.data_ranks)],
        dtype=torch.float64,
    )
    assert all(torch.equal(cast(Tensor, result), expected) for result in results)


def test_two_lanes_of_the_same_ranks_never_mix_their_messages() -> None:
    grid = Grid.of_nodes(1, 2)
    climb, descend = Lane(Link.INTRA, Direction.CLIMB), Lane(Link.INTRA, Direction.DESCEND)

    def program(backend: VirtualBackend) -> tuple[Tensor, Tensor]:
        outputs = torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
        posts = [(climb, outputs[0], 10), (descend, outputs[1], 20)]
        works = [
            backend.all_gather(lane, output, torch.tensor([base + backend.rank], dtype=torch.uint8))
            for lane, output, base in (posts if backend.rank == 0 else reversed(posts))
        ]
        for work in works:
            work.wait()
        return outputs

    for climbed, descended in cast(list[tuple[Tensor, Tensor]], VirtualWorld(grid).run(program)):
        assert (climbed.tolist(), descended.tolist()) == ([10, 11], [20, 21])


@pytest.mark.parametrize("failing_rank", [0, 3])
def test_an_error_on_one_rank_ends_all_and_is_the_one_that_is_raised(failing_rank: int) -> None:
    ended = []

    def program(backend: VirtualBackend) -> None:
        lanes = ThreadLanes()
        try:
            for index in range(3):
                if backend.rank == failing_rank and index == 1:
                    raise KeyError("rank gives up")
                output = torch.empty(2, dtype=torch.uint8)
                lane = LANES[index % 2]
                hop = Hop("hop", lane, lambda lane=lane, output=output: _gather(backend, lane, output), lambda: None)  # type: ignore[misc]
                lanes.submit(hop)
                lanes.wait(hop)
                backend.gather_world(torch.ones(1))
        finally:
            ended.append(backend.rank)

    with pytest.raises(KeyError, match="rank gives up"):
        VirtualWorld(Grid.of_nodes(2, 2)).run(program)
    assert sorted(ended) == [0, 1, 2, 3]


def _gather(backend: VirtualBackend, lane: Lane, output: Tensor) -> object:
    return backend.all_gather(lane, output, torch.ones(1, dtype=torch.uint8))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("sizes", [(4, 6), (6, 4)])
def test_members_that_send_unequal_sizes_fail_as_they_would_on_real_ranks(sizes: tuple[int, int]) -> None:
    def program(backend: VirtualBackend) -> None:
        numel = sizes[backend.rank]
        backend.all_gather(LANES[1], torch.empty(2 * numel, dtype=torch.uint8), _bytes_of(backend.rank, numel)).wait()

    with pytest.raises((RuntimeError, ValueError)):
        VirtualWorld(Grid.of_nodes(1, 2)).run(program)


def test_a_member_that_has_not_waited_yet_holds_nothing_that_others_have_sent_or_received() -> None:
    world, lane = VirtualWorld(Grid.of_nodes(1, 2)), LANES[1]
    work = world.backend_of(0).all_gather(lane, torch.empty(4, dtype=torch.uint8), _bytes_of(0, 2))
    output, sent = torch.empty(4, dtype=torch.uint8), _bytes_of(1, 2)
    freed = [weakref.ref(tensor) for tensor in (output, sent)]
    world.backend_of(1).all_gather(lane, output, sent)
    del output, sent
    assert [tensor() for tensor in freed] == [None, None]
    work.wait()


@pytest.mark.parametrize("is_cuda", [True, False])
def test_on_a_gpu_a_collective_runs_in_the_stream_that_calls_it(is_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has a stream of its own for those with async_op."""
    asked: list[bool] = []

    def collective(*buffers: object, group: object, async_op: bool) -> object:
        asked.append(async_op)
        return object() if async_op else None

    monkeypatch.setattr(backend_module, "all_gather", collective)
    monkeypatch.setattr(backend_module.dist, "all_to_all_single", collective)
    lane, buffer = LANES[0], cast(Any, SimpleNamespace(is_cuda=is_cuda))
    backend = TorchBackend(GRIDS[0], 0, {lane: cast(Any, None)})
    works = [call(lane, buffer, buffer) for call in (backend.all_gather, backend.exchange)]
    assert asked == [not is_cuda] * 2 and [work is None for work in works] == [is_cuda] * 2
