"""Exchanges between the ranks that share samples: values, bytes, order, errors, and what is told of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness.counting_backend import CountingBackend
from harness.worlds import TurnLanes, run_world
from torch import Tensor

from megatron_zpp.comm.backend import Backend, VirtualBackend, Work
from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.comm.ledger import Category, Ledger, Traffic
from megatron_zpp.comm.links import Ladder
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.waits import Waits
from megatron_zpp.monitor.observer import StepObserver
from megatron_zpp.monitor.timers import TIMER_LEVELS
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Lane, Link

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
def test_parts_that_are_not_one_for_each_rank_are_refused_and_a_result_is_handed_out_once() -> None:
    def program(backend: VirtualBackend) -> None:
        link = link_of(backend)
        with pytest.raises(RuntimeError, match="the 2 ranks of the context link cannot exchange 3 parts"):
            link.exchange(torch.zeros(3, 4))
        pending = link.start_exchange(torch.zeros(2, 4))
        pending.wait()
        with pytest.raises(RuntimeError, match="a result of the context link was waited for twice"):
            pending.wait()

    run_world(PAIR, program)


@dataclass
class BrokenWork:
    """A collective that has ended with an error, or never ends."""

    error: Exception | None = None

    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    def when_ended(self, call: Callable[[], None]) -> None:
        if self.error is not None:
            call()


@dataclass
class BrokenBackend:
    """Rank 5 of groups of two over four tensor ranks, whose exchanges are all like `work`."""

    work: BrokenWork
    rank: int = 5
    grid: Grid = field(default_factory=lambda: Grid(8, 4, 1, 4, 2))

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        return self.work

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        raise NotImplementedError

    def gather_world(self, own: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("waits", [Waits(), Waits(watch=lambda: None)], ids=["without a watch", "with a watch"])
def test_an_error_of_the_link_names_it_and_its_ranks(waits: Waits) -> None:
    link = link_of(BrokenBackend(BrokenWork(RuntimeError("Connection reset by peer"))), waits=waits)
    with pytest.raises(RuntimeError, match="^context link of ranks 1, 5: the collective failed, .*Connection reset by peer"):
        link.exchange(torch.ones(2, 4))


def test_a_long_wait_ends_with_what_the_watch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_zpp.comm.operation.WATCH_SECONDS", 0.01)
    looks = iter([None, None, RuntimeError("rank 1 failed")])

    def watch() -> None:
        if (error := next(looks)) is not None:
            raise error

    with pytest.raises(RuntimeError, match="^rank 1 failed"):
        link_of(BrokenBackend(BrokenWork()), waits=Waits(watch)).exchange(torch.ones(2, 4))
    assert not list(looks)


@pytest.mark.virtual
def test_the_observer_is_told_of_every_exchange_and_a_timer_of_its_own_of_the_waits_alone() -> None:
    def program(backend: VirtualBackend) -> tuple[list[str], list[str]]:
        phases, ranges = list[str](), list[str]()

        def span_of(names: list[str]) -> Any:
            @contextmanager
            def span(name: str) -> Iterator[None]:
                names.append(name)
                yield

            return span

        observer = StepObserver((span_of(phases),), (span_of(ranges),))
        ladder = Ladder(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU, waits=Waits(observer=observer))
        assert ladder.context_link is not None and ladder.tensor_link is None
        ladder.context_link.exchange(torch.ones(2, 4))
        return phases, [name for name in ranges if name != "context-link"]

    for phases, ranges in run_world(PAIR, program):
        assert phases == ["context-link"] and TIMER_LEVELS["context-link"] == 2
        assert ranges == [f"context-link exchange {part}" for part in ("send", "wait", "decode")]


@pytest.mark.virtual
def test_a_ladder_has_a_context_link_if_and_only_if_others_share_its_samples() -> None:
    def program(backend: VirtualBackend) -> bool:
        return Ladder(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU).context_link is not None

    assert [run_world(Grid.of_nodes(1, 2, 1, ranks), program) for ranks in (1, 2)] == [[False, False], [True, True]]
