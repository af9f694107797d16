"""Decides when each unit's gradient descends: once it is complete, in one order on every rank, a few at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from megatron_zpp.zero.unit_descent import UnitDescent

LARGEST_UNDER_WAY = 2  # descents; each holds the gradient of a whole unit until it has landed


class Descents:
    """The descents of one rank.

    order: the names of all units in the order in which they descend. A unit that is complete before its turn waits
    for those before it, so that every rank sends the same messages in the same order.
    """

    def __init__(self, order: Sequence[str], gradients: Mapping[str, UnitDescent]) -> None:
        self._order = order
        self._gradients = gradients
        self._complete: set[str] = set()
        self._submitted = 0
        self._under_way: deque[UnitDescent] = deque()

    def complete(self, name: str, *, is_last_microbatch: bool) -> None:
        """Notes that the unit's gradient is complete, and submits every descent that may start now."""
        self._complete.add(name)
        while self._submitted < len(self._order) and self._order[self._submitted] in self._complete:
            gradient = self._gradients[self._order[self._submitted]]
            gradient.descend(is_last_microbatch=is_last_microbatch)
            self._submitted += 1
            self._under_way.append(gradient)
            if len(self._under_way) > LARGEST_UNDER_WAY:
                self._under_way.popleft().finish()

    def has_completed(self, name: str) -> bool:
        """Whether the unit's gradient of this micro-batch is complete."""
        return name in self._complete

    def complete_over(self, is_over: Callable[[str], bool], *, is_last_microbatch: bool) -> None:
        """Completes the units whose turn it is, and for which no more gradients come, with zeros for parameters that got none.

        Other ranks may have gradients for these parameters. They have submitted the descent, and may wait for this rank.
        """
        for name in self._order[self._submitted :]:
            if name not in self._complete:
                if not is_over(name):
                    return
                self._gradients[name].fill_missing()
                self.complete(name, is_last_microbatch=is_last_microbatch)

    def sweep(self, *, is_last_microbatch: bool) -> None:
        """Ends a micro-batch: no more gradients come for any unit."""
        self.complete_over(lambda name: True, is_last_microbatch=is_last_microbatch)
        self._complete.clear()
        self._submitted = 0

    def finish(self) -> None:
        """Returns once every descent under way has landed."""
        while self._under_way:
            self._under_way.popleft().finish()
