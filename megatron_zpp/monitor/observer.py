"""Who is told what a step is doing, and when: nobody, timers, named ranges of a profiler, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

_NOTHING: AbstractContextManager[None] = nullcontext()

Span = Callable[[str], AbstractContextManager[object]]


class Observer:
    """Hears of the phases of a step, its hops over links and its units, and takes no note."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Around a phase of the step; names are those of monitor.timers.TIMER_LEVELS."""
        return _NOTHING

    def hop(self, name: str) -> AbstractContextManager[object]:
        """Around what the host does for a hop: encode and send it, wait for it, decode it."""
        return _NOTHING

    def begin_unit(self, verb: str, name: str) -> None:
        """From here on a use computes; ends the one before it, if that has not ended. verb: forward or backward. name: of its units."""

    def end_unit(self) -> None:
        """No use computes any more."""


class StepObserver(Observer):
    """Passes phases on to all of `phases`, and everything to all of `ranges`."""

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
        # A unit's range is open from one hook to another; on CUDA autograd calls hooks in a thread of its own.
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
