"""Sums and gathers between the ranks that share layers: bits, bytes, errors, and what is told of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from harness.counting_backend import CountingBackend
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import Backend, VirtualBackend
from megatron_zpp.comm.ledger import Category, Ledger, Traffic
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.tensor_link import TensorLink, add_in_order, padded_part_numel
from megatron_zpp.comm.waits import Waits
from megatron_zpp.parallel.grid import Grid

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GRIDS = [Grid(4, 4, 2, 2), Grid(6, 3, 1, 3), Grid(4, 4, 1, 4)]

Result = TypeVar("Result")


def values_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of very different sizes, so that another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()).to(dtype)


def added_in_order(values: list[Tensor]) -> Tensor:
    total = values[0].float()
    for value in values[1:]:
        total = total + value.float()
    return total.to(values[0].dtype)


def on_links(grid: Grid, program: Callable[[TensorLink], Result]) -> list[Result]:
    """What `program` returns on each rank."""
    return run_world(grid, lambda backend: program(link_of(backend)))


def link_of(backend: Backend, ledger: Ledger | None = None, waits: Waits | None = None) -> TensorLink:
    return TensorLink(backend, ledger or Ledger(backend.grid, backend.rank), Staging(CPU), None, waits or Waits())


def group_of(grid: Grid, rank: int) -> list[int]:
    return [grid.rank_of(grid.data_rank_of(rank), tensor_rank) for tensor_rank in range(grid.tensor_ranks)]


# ---- bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_sum_has_the_bits_of_adding_rank_after_rank_in_fp32_and_rounding_once(ranks: int, dtype: torch.dtype) -> None:
    values = [values_of(rank, 4099, dtype=dtype) for rank in range(ranks)]
    for rank, special in enumerate([-0.0, float("inf"), -0.0]):
        values[rank % ranks][rank::7] = special
    total = torch.empty(4099, dtype=dtype)
    add_in_order(torch.stack(values), total)
    assert total.view(torch.uint8).equal(added_in_order(values).view(torch.uint8))


@pytest.mark.virtual
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_rank_gets_the_whole_sum_its_part_of_it_and_the_values_of_all_of_its_group_and_of_no_other(
    grid: Grid, dtype: torch.dtype
) -> None:
    # gloo and NCCL exchange whole parts; 5 x 7 is a multiple of no number of ranks, 12 rows are one of each
    rows = 12

    def program(backend: VirtualBackend) -> list[Tensor]:
        link, odd, even = (
            link_of(backend),
            values_of(backend.rank, 5, 7, dtype=dtype),
            values_of(backend.rank, rows, 3, dtype=dtype),
        )
        at_once = [link.summed(odd), link.sum_scattered(even), link.gather(odd)]
        started = [link.start_summed(odd), link.start_sum_scattered(even), link.start_gather(odd)]
        assert all(one.wait().equal(other) for one, other in zip(started, at_once, strict=True))
        assert (link.ranks, link.rank) == (grid.tensor_ranks, grid.tensor_rank_of(backend.rank))
        return at_once

    for rank, (whole, part, gathered) in enumerate(run_world(grid, program)):
        group, own = group_of(grid, rank), grid.tensor_rank_of(rank)
        odd = [values_of(member, 5, 7, dtype=dtype) for member in group]
        even = [values_of(member, rows, 3, dtype=dtype) for member in group]
        assert whole.equal(added_in_order(odd)) and whole.dtype is dtype
        assert part.equal(added_in_order(even).chunk(grid.tensor_ranks)[own])
        assert gathered.equal(torch.stack(odd))


@pytest.mark.virtual
def test_values_that_are_not_contiguous_or_need_gradients_are_summed_like_any_others() -> None:
    def program(link: TensorLink) -> Tensor:
        values = values_of(link.rank, 6, 4).requires_grad_().T
        whole = link.summed(values)
        assert not whole.requires_grad and link.gather(values)[link.rank].equal(values)
        return whole

    (whole, _) = on_links(Grid(2, 2, 1, 2), program)
    assert whole.equal(added_in_order([values_of(rank, 6, 4).T for rank in range(2)]))


@pytest.mark.virtual
def test_results_may_be_waited_for_in_another_order_than_that_of_their_start() -> None:
    def program(link: TensorLink) -> None:
        first, second = link.start_sum_scattered(values_of(link.rank, 4)), link.start_gather(values_of(link.rank, 4))
        assert second.wait().equal(torch.stack([values_of(rank, 4) for rank in range(2)]))
        assert first.wait().equal(added_in_order([values_of(rank, 4) for rank in range(2)])[2 * link.rank :][:2])

    on_links(Grid(2, 2, 1, 2), program)


# ---- bytes


def test_a_part_is_as_short_as_parts_of_16_bytes_allow() -> None:
    assert [padded_part_numel(numel, 2, 2) for numel in (1, 16, 17, 33)] == [8, 8, 16, 24]
    assert padded_part_numel(4096 * 1024, 8, 2) * 8 == 4096 * 1024


@pytest.mark.virtual
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_ledger_has_the_bytes_of_every_operation_under_what_they_are_for(grid: Grid) -> None:
    ranks = grid.tensor_ranks

    def program(backend: VirtualBackend) -> Ledger:
        counted = CountingBackend(backend)
        ledger = Ledger(grid, backend.rank)
        link = link_of(counted, ledger)
        link.gather(values_of(0, 5))
        link.sum_scattered(values_of(0, 12, 3))
        link.book_under(Category.EVALUATION)
        link.start_summed(values_of(0, 7, dtype=torch.bfloat16)).wait()
        link.gather(values_of(0, 9), Category.REPLICAS)
        link.book_under(Category.ACTIVATIONS)
        assert counted.received_bytes == ledger.total(*Category).tensor_bytes
        return ledger

    for ledger in run_world(grid, program):
        activations = (ranks - 1) * (5 * 4 + 36 * 4 // ranks)
        assert ledger.total(Category.ACTIVATIONS) == Traffic(tensor_bytes=activations)
        assert ledger.total(Category.EVALUATION) == Traffic(tensor_bytes=2 * (ranks - 1) * padded_part_numel(7, ranks, 2) * 2)
        assert ledger.total(Category.REPLICAS) == Traffic(tensor_bytes=(ranks - 1) * 36)
        assert ledger.total(Category.WEIGHTS, Category.GRADIENTS, Category.CONTROL) == Traffic()


# ---- order


@pytest.mark.virtual
def test_ranks_that_pause_before_their_collectives_and_waits_make_the_same_ones_in_the_same_order() -> None:
    grid = Grid(4, 4, 2, 2)

    def program(backend: VirtualBackend) -> tuple[list[tuple[str, int]], Tensor]:
        generator = random.Random(backend.rank)
        pause = lambda: time.sleep(generator.choice([0.0, 0.001]))  # noqa: E731
        counted = CountingBackend(backend, pause)
        link, total = link_of(counted), torch.zeros(8, 6)
        for step in range(30):
            values = values_of(100 * step + backend.rank, 8, 6)
            gathering, summing = link.start_gather(values[:3]), link.start_summed(values)
            pause()
            total += link.summed(values) + summing.wait()
            total[:4] += link.sum_scattered(values)
            total[:3] += gathering.wait().sum(dim=0)
        return counted.calls, total

    calls, totals = zip(*run_world(grid, program, takes_turns=False), strict=True)
    assert calls[0] == calls[1] and calls[2] == calls[3] and len(calls[0]) == 30 * 6
    assert not totals[0].equal(totals[2])  # of other data ranks


# ---- errors


@pytest.mark.virtual
def test_rows_that_the_ranks_cannot_share_are_refused() -> None:
    def program(link: TensorLink) -> None:
        with pytest.raises(RuntimeError, match="the 2 ranks of the tensor link cannot share 5 rows"):
            link.sum_scattered(values_of(link.rank, 5, 2))

    on_links(Grid(2, 2, 1, 2), program)
