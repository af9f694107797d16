"""The calls of uses in forward, from which backward knows what is over.

Autograd runs the backward of what was computed last first. So when backward comes to a call, no more gradients come from later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_zpp.parallel.specs import Use


@dataclass(frozen=True)
class Call:
    """A call of a use in a forward with gradients. number: counts these calls. begun: how many had ended before it began.

    forward: counts the forwards. iteration: the steps that were done before it.
    """

    use: int
    number: int
    begun: int
    forward: int
    iteration: int


class Calls:
    """The calls of a step, and how far backward has come in them.

    ends_at_once: whether the loss under way joins several forwards. Other ranks may have left out other uses of each, so no unit is over
    before the end.
    """

    def __init__(self, uses: Sequence[Use]) -> None:
        self._units = [use.units for use in uses]
        self._next = 0
        self._forward = 0
        self._begun: dict[int, int] = {}  # by use called in this forward, how many calls with gradients had ended before it began
        self._open: dict[int, Call] = {}  # by number, those that no backward has reached
        self.ends_at_once = False
        self._reached = 0
        self._forward_reached: int | None = None
        self._first: dict[str, int] = {}  # by unit that backward will reach, `begun` of the first of its calls

    def begin_forward(self) -> None:
        """A forward begins."""
        self._forward += 1
        self._begun = {}

    def begin(self, use: int) -> bool:
        """A call begins. Returns whether it comes in order in its forward. A second call of a use begins another forward."""
        if use in self._begun:
            self.begin_forward()
        comes_in_order = use >= max(self._begun, default=0)
        self._begun[use] = self._next
        return comes_in_order

    def end(self, use: int, iteration: int) -> Call:
        """The same call ends."""
        call = self._open[self._next] = Call(use, self._next, self._begun[use], self._forward, iteration)
        self._next += 1
        return call

    def begin_backward(self, calls_of_loss: Callable[[], Iterable[Call]]) -> None:
        """Backward begins. calls_of_loss: finds the calls on which the loss depends; it is called only if several forwards are open."""
        calls = list(self._open.values())
        if _are_of_several_forwards(calls):
            calls = list(calls_of_loss())
        self.ends_at_once = _are_of_several_forwards(calls)
        self._reached, self._forward_reached, self._first = self._next, None, {}
        for call in calls:
            for unit in self._units[call.use]:
                self._first[unit] = min(call.begun, self._first.get(unit, call.begun))

    def reach(self, call: Call) -> bool:
        """Backward comes to a call. Returns whether it has come there from the calls of another forward."""
        before, self._forward_reached = self._forward_reached, call.forward
        self._reached = call.number
        self._open.pop(call.number, None)
        return before not in (None, call.forward)

    def is_over(self, unit: str) -> bool:
        """Whether no more gradients of the unit come in this backward."""
        return not self.ends_at_once and self._reached < self._first.get(unit, self._next)

    def end_backward(self) -> None:
        """Backward comes to its end."""
        self._reached = -1

    def end_step(self) -> None:
        """What was called before it is not used any more."""
        self._open.clear()


def _are_of_several_forwards(calls: Sequence[Call]) -> bool:
    return len({call.forward for call in calls}) > 1
