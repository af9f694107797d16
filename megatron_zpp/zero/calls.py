"""The calls of uses in forward, from which backward knows what is over (no torch).

Autograd runs the backward of what was computed last first. So when backward comes to a call, no more gradients come from later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_zpp.parallel.specs import Use


@dataclass(frozen=True)
class Call:
    """A call of a use in a forward with gradients. number: counts these calls. begun: how many had ended before it began.

    iteration: the steps that were done before it.
    """

    use: int
    number: int
    begun: int
    iteration: int


class Calls:
    """The calls of a step, and how far backward has come in them.

    ends_at_once: whether the loss under way joins several forwards. Other ranks may have left out other uses of each, so no unit is over
    before the end.
    """

    def __init__(self, uses: Sequence[Use]) -> None:
        self._units = [use.units for use in uses]
        self._next = 0
        self._begun: dict[int, int] = {}  # by use, how many calls had ended before its latest call began
        self._open: dict[int, Call] = {}  # by number, those that no backward has reached
        self.ends_at_once = False
        self._reached = 0
        self._first: dict[str, int] = {}  # by unit that backward will reach, `begun` of the first of its calls

    def begin(self, use: int) -> None:
        """A call begins."""
        self._begun[use] = self._next

    def end(self, use: int, iteration: int) -> Call:
        """The same call ends."""
        call = self._open[self._next] = Call(use, self._next, self._begun[use], iteration)
        self._next += 1
        return call

    def begin_backward(self, calls_of_loss: Callable[[], Iterable[Call]]) -> None:
        """Backward begins. calls_of_loss: finds the calls on which the loss depends; it is called only if several forwards are open."""
        calls = list(self._open.values())
        if _is_any_twice(calls):
            calls = list(calls_of_loss())
        self.ends_at_once = _is_any_twice(calls)
        self._reached, self._first = self._next, {}
        for call in calls:
            for unit in self._units[call.use]:
                self._first[unit] = min(call.begun, self._first.get(unit, call.begun))

    def reach(self, call: Call) -> None:
        """Backward comes to a call."""
        self._reached = call.number
        self._open.pop(call.number, None)

    def is_over(self, unit: str) -> bool:
        """Whether no more gradients of the unit come in this backward."""
        return not self.ends_at_once and self._reached < self._first.get(unit, self._next)

    def end_backward(self) -> None:
        """Backward comes to its end."""
        self._reached = -1

    def end_step(self) -> None:
        """What was called before it is not used any more."""
        self._open.clear()


def _is_any_twice(calls: Sequence[Call]) -> bool:
    """Whether they are of several forwards: a forward calls each use once."""
    return len({call.use for call in calls}) < len(calls)
