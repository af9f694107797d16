"""Exchanges between the ranks that divide samples: values, bytes, order, errors, and what is told of them."""

from __future__ import annotations

import random
import time

import pytest
import torch
from harness.counting_backend import CountingBackend
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import Backend, VirtualBackend
from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.comm.ledger import Category, Ledger, Traffic
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.waits import Waits
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Link

CPU = torch.device("cpu")
# A pair, neighbours beside tensor ranks, whole nodes beside tensor ranks, three.
GRIDS = [Grid(2, 2, 2, 1, 2), Grid(8, 8, 2, 2, 2), Grid(8, 4, 2, 2, 4), Grid(6, 3, 3, 1, 3)]
PAIR = GRIDS[0]


def parts_of(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rank` has for each rank of its group."""
    return (1000 * rank + torch.arange(ranks * 6).view(ranks, 2, 3)).to(dtype)


def link_of(backend: Backend, ledger: Ledger | None = None, waits: Waits | None = None) -> ContextLink:
    return ContextLink(backend, ledger or Ledger(backend.grid, backend.rank), Staging(CPU), None, waits or Waits())


@pytest.mark.virtual
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_rank_gets_its_part_of_each_rank_of_its_group_and_of_no_other(grid: Grid, dtype: torch.dtype) -> None:
    def program(backend: VirtualBackend) -> Tensor:
        link, parts = link_of(backend), parts_of(backend.rank, grid.context_ranks, dtype)
        assert (link.ranks, link.rank) == (grid.context_ranks, grid.context_rank_of(backend.rank))
        found = link.exchange(parts)
        strided = parts.mT.contiguous().mT.requires_grad_(dtype.is_floating_point)
        assert link.start_exchange(strided).wait().equal(found) and not found.requires_grad
        return found

    for rank, found in enumerate(run_world(grid, program)):
        members, own = grid.members(Link.CONTEXT, rank), grid.context_rank_of(rank)
        assert found.equal(torch.stack([parts_of(member, grid.context_ranks, dtype)[own] for member in members]))


@pytest.mark.virtual
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_ledger_has_the_bytes_under_what_they_are_for_and_how_many_of_them_come_from_other_nodes(grid: Grid) -> None:
    def program(backend: VirtualBackend) -> Ledger:
        counted, ledger = CountingBackend(backend), Ledger(grid, backend.rank)
        link = link_of(counted, ledger)
        link.exchange(torch.zeros(grid.context_ranks, 5))
        link.book_under(Category.EVALUATION)
        link.start_exchange(torch.zeros(grid.context_ranks, 3, 2, dtype=torch.bfloat16)).wait()
        assert counted.received_bytes == ledger.total(*Category).context_bytes
        return ledger

    for rank, ledger in enumerate(run_world(grid, program)):
        others = [other for other in grid.members(Link.CONTEXT, rank) if other != rank]
        elsewhere = sum(not grid.share_node(rank, other) for other in others)
        assert ledger.total(Category.EXCHANGES) == Traffic(context_bytes=20 * len(others), context_inter_bytes=20 * elsewhere)
        assert ledger.total(Category.EVALUATION) == Traffic(context_bytes=12 * len(others), context_inter_bytes=12 * elsewhere)
        assert ledger.context_inter_node_bytes(ledger.total(Category.EXCHANGES)) == 20 * elsewhere * grid.ranks_per_node
        assert ledger.inter_node_bytes(ledger.total(*Category)) == 0


@pytest.mark.virtual
def test_ranks_that_pause_before_their_exchanges_and_waits_make_the_same_ones_in_the_same_order() -> None:
    grid = Grid(4, 4, 4, 1, 2)

    def program(backend: VirtualBackend) -> tuple[list[tuple[str, int]], Tensor]:
        generator = random.Random(backend.rank)
        pause = lambda: time.sleep(generator.choice([0.0, 0.001]))  # noqa: E731
        counted = CountingBackend(backend, pause)
        link, total = link_of(counted), torch.zeros(2, 6)
        for step in range(30):
            values = parts_of(step + backend.rank, 2).view(2, 6)
            started = link.start_exchange(values)
            pause()
            total += link.exchange(values[:, :3]).repeat(1, 2) + started.wait()
        return counted.calls, total

    calls, totals = zip(*run_world(grid, program, takes_turns=False), strict=True)
    assert calls[0] == calls[1] and len(calls[0]) == 60
    assert not totals[0].equal(totals[2])  # of other samples


@pytest.mark.virtual
def test_parts_that_are_not_one_for_each_rank_are_refused() -> None:
    def program(backend: VirtualBackend) -> None:
        with pytest.raises(RuntimeError, match="the 2 ranks of the context link cannot exchange 3 parts"):
            link_of(backend).exchange(torch.zeros(3, 4))

    run_world(PAIR, program)
