"""The calls of uses in forward, from which backward knows what is over (no torch).

Autograd runs the backward of what was computed last first. So when backward comes to a call, no more gradients come from later calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zpp.parallel.specs import Use


@dataclass(frozen=True)
class Call:
    """A call of a use in a forward with gradients. number: counts these calls. iteration: the steps that were done before it."""

    number: int
    iteration: int


class Calls:
    """The calls since the last backward."""

    def __init__(self, uses: Sequence[Use]) -> None:
        self._units = [use.units for use in uses]
        self._next = 0
        self._first = 0  # the number of the first call since the last backward
        self._reached = 0
        self._begun: dict[str, int] = {}  # by unit, the number of calls that ended before the first one that reads it began

    def begin(self, use: int) -> None:
        """A call begins."""
        for unit in self._units[use]:
            self._begun.setdefault(unit, self._next)

    def end(self, iteration: int) -> Call:
        """The same call ends."""
        self._next += 1
        return Call(self._next - 1, iteration)

    def reach(self, call: Call | None) -> None:
        """Backward comes to a call, or to its end. Nothing is known to be over if the call is older than the last backward."""
        self._reached = -1 if call is None else call.number if call.number >= self._first else self._next

    def is_over(self, unit: str) -> bool:
        """Whether no more gradients of the unit come in this backward."""
        return self._reached < self._begun.get(unit, self._next)

    def end_backward(self) -> None:
        """The next call belongs to another backward."""
        self._first = self._next
        self._begun.clear()
