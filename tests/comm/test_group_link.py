"""What the tensor link and the context link have in common: errors, long waits, and what is told of their collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from harness.worlds import TurnLanes, run_world
from torch import Tensor

from megatron_zpp.comm.backend import Backend, VirtualBackend, Work
from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.comm.waits import Waits
from megatron_zpp.monitor.observer import StepObserver
from megatron_zpp.monitor.timers import TIMER_LEVELS
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Lane

CPU = torch.device("cpu")
AnyLink = TensorLink | ContextLink


@dataclass(frozen=True)
class Kind:
    """One of the two links. pair: two ranks that it joins. rank: one of `grid`, whose group is `members`.

    operations: the collectives of each.
    """

    name: str
    pair: Grid
    grid: Grid
    rank: int
    members: str
    of_ladder: Callable[[Links], AnyLink | None]
    make: type[TensorLink] | type[ContextLink]
    operations: dict[str, tuple[str, ...]]

    def link(self, backend: Backend, waits: Waits) -> AnyLink:
        return self.make(backend, Ledger(backend.grid, backend.rank), Staging(CPU), None, waits)

    def links(self, backend: Backend, waits: Waits | None = None) -> Links:
        return Links(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU, waits=waits or Waits())


TENSOR = Kind(
    name="tensor",
    pair=Grid.of_nodes(1, 2, 2),
    grid=Grid(4, 4, 2, 2),
    rank=3,
    members="2, 3",
    of_ladder=lambda links: links.tensor_link,
    make=TensorLink,
    operations={"gather": ("gather",), "summed": ("sum", "gather"), "sum_scattered": ("sum",)},
)
CONTEXT = Kind(
    name="context",
    pair=Grid.of_nodes(1, 2, 1, 2),
    grid=Grid(8, 4, 1, 4, 2),
    rank=5,
    members="1, 5",
    of_ladder=lambda links: links.context_link,
    make=ContextLink,
    operations={"exchange": ("exchange",)},
)
both_links = pytest.mark.parametrize("kind", [TENSOR, CONTEXT], ids=["tensor", "context"])


@both_links
@pytest.mark.virtual
def test_a_result_is_handed_out_once(kind: Kind) -> None:
    def program(backend: VirtualBackend) -> None:
        link = kind.link(backend, Waits())
        for operation in kind.operations:
            pending = getattr(link, f"start_{operation}")(torch.zeros(2, 4))
            pending.wait()
            with pytest.raises(RuntimeError, match=f"a result of the {kind.name} link was waited for twice"):
                pending.wait()

    run_world(kind.pair, program)


class StuckWork:
    """A collective that never ends, or that has ended with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def when_ended(self, call: Callable[[], None]) -> None:
        if self._error is not None:
            call()


@dataclass
class StuckBackend:
    """One rank whose collectives are all like `work`."""

    work: StuckWork
    rank: int
    grid: Grid

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        return self.work

    exchange = all_gather

    def gather_world(self, own: Tensor) -> Tensor:
        raise NotImplementedError


@both_links
def test_a_long_wait_ends_with_what_the_watch_raises(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_zpp.comm.operation.WATCH_SECONDS", 0.01)
    for operation in kind.operations:
        looks = iter([None, None, RuntimeError("rank 1 failed")])

        def watch(looks: Iterator[Exception | None] = looks) -> None:
            if (error := next(looks)) is not None:
                raise error

        link = kind.link(StuckBackend(StuckWork(), kind.rank, kind.grid), Waits(watch))
        with pytest.raises(RuntimeError, match="^rank 1 failed"):
            getattr(link, operation)(torch.ones(2, 4))
        assert not list(looks)


@both_links
@pytest.mark.parametrize("waits", [Waits(), Waits(watch=lambda: None)], ids=["without a watch", "with a watch"])
def test_an_error_of_the_link_names_it_and_its_ranks(kind: Kind, waits: Waits) -> None:
    link = kind.link(StuckBackend(StuckWork(RuntimeError("Connection reset by peer")), kind.rank, kind.grid), waits)
    message = f"^{kind.name} link of ranks {kind.members}: the collective failed, .*Connection reset by peer"
    for operation in kind.operations:
        with pytest.raises(RuntimeError, match=message):
            getattr(link, operation)(torch.ones(2, 4))


@both_links
@pytest.mark.virtual
def test_the_observer_is_told_of_every_collective_and_a_timer_of_its_own_of_the_waits_alone(kind: Kind) -> None:
    timer = f"{kind.name}-link"

    def program(backend: VirtualBackend) -> list[str]:
        told = list[str]()

        @contextmanager
        def span(name: str) -> Iterator[None]:
            told.append(name)
            yield
            told.append(f"end of {name}")

        link = kind.of_ladder(kind.links(backend, Waits(observer=StepObserver((span,), (span,)))))
        for operation in kind.operations:
            getattr(link, operation)(torch.ones(2, 4))
            getattr(link, f"start_{operation}")(torch.ones(2, 4)).wait()
        return told

    expected = [name for stages in kind.operations.values() for stage in 2 * stages for name in told_of(f"{timer} {stage}", timer)]
    assert run_world(kind.pair, program) == [expected] * 2
    assert TIMER_LEVELS[timer] == 2


def told_of(collective: str, timer: str) -> list[str]:
    send, wait, decode = (f"{collective} {part}" for part in ("send", "wait", "decode"))
    timed = [timer, timer, wait, f"end of {wait}", f"end of {timer}", f"end of {timer}"]  # in phases and in ranges
    return [send, f"end of {send}", *timed, decode, f"end of {decode}"]


@both_links
@pytest.mark.virtual
def test_a_ladder_has_the_link_if_and_only_if_the_rank_has_somebody_to_share_with(kind: Kind) -> None:
    other = CONTEXT if kind is TENSOR else TENSOR

    def program(backend: VirtualBackend) -> bool:
        return kind.of_ladder(kind.links(backend)) is not None

    assert [run_world(grid, program) for grid in (Grid.of_nodes(1, 2), other.pair, kind.pair)] == [[False] * 2, [False] * 2, [True] * 2]
