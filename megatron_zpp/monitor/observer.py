"""Reports phases, hops and units of a step to timers and to the named ranges of profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

_NOTHING: AbstractContextManager[None] = nullcontext()

Span = Callable[[str], AbstractContextManager[object]]


class Observer:
    """Observer of a step's phases, hops and units that ignores all of them. One that listens is a subclass."""

    @property
    def is_on(self) -> bool:
        """Whether it listens now. If not, what is named for it alone may be left out."""
        return type(self) is not Observer

    def phase(self, name: str) -> AbstractContextManager[object]:
        """The context around a phase of the step; names are those of monitor.timers.TIMER_LEVELS."""
        return _NOTHING

    def hop(self, name: str) -> AbstractContextManager[object]:
        """The context around the host's work for a hop: encode and send it, wait for it, decode it."""
        return _NOTHING

    def begin_unit(self, verb: str, name: str) -> None:
        """A use begins to compute; the use before it ends if it has not. verb: forward or backward. name: the names of the use's units."""

    def end_unit(self) -> None:
        """The use has finished computing."""


class StepObserver(Observer):
    """Reports phases to all spans of `phases`, and phases, hops and units to all spans of `ranges`."""

    def __init__(self, phases: tuple[Span, ...], ranges: tuple[Span, ...]) -> None:
        self._of_phases = phases + ranges
        self._of_ranges = ranges
        self._unit: AbstractContextManager[object] | None = None

    def phase(self, name: str) -> AbstractContextManager[object]:
        return _all_of(self._of_phases, name)

    def hop(self, name: str) -> AbstractContextManager[object]:
        return _all_of(self._of_ranges, name)

    def begin_unit(self, verb: str, name: str) -> None:
        self.end_unit()
        if self._of_ranges:
            self._unit = _all_of(self._of_ranges, f"{verb} {name}")
            self._unit.__enter__()

    def end_unit(self) -> None:
        # A unit's range opens in one hook and closes in another; on CUDA autograd calls hooks in a thread of its own.
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.__exit__(None, None, None)


def _all_of(spans: tuple[Span, ...], name: str) -> AbstractContextManager[object]:
    if not spans:
        return _NOTHING
    return spans[0](name) if len(spans) == 1 else _nested(spans, name)


@contextmanager
def _nested(spans: tuple[Span, ...], name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for span in spans:
            stack.enter_context(span(name))
        yield
