"""Puts the updates of a step off until the next forward needs them, for an optimizer on the host.

    host      norm | AdamW 0 1 2 | launch use 0, AdamW 3 | launch use 1, AdamW 4 | launch use 2 ...
    device                                 use 0                   use 1                  use 2

A unit is updated just before its next climb is submitted, by the thread that enqueues the work of the device. So the device computes what
has been enqueued while the host updates, and no other thread is needed: it would wait for this one's launches and for the interpreter, and
could save no more time, because this thread has nothing else to do. On a CPU both would share the same cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_zpp.zero.optimizer import Update


class LaterUpdates:
    """The updates of the last step that have not been made. Main weights, moments and sums of gradients may be read after `finish` alone.

    An update that fails raises its error where it was needed; from then on every call raises a RuntimeError that names it as its cause.
    """

    def __init__(self, update: Callable[[int, Update], None], group_of: Mapping[str, int]) -> None:
        """update: makes that of one group. group_of: by unit, its group; groups are updated in the order of their numbers."""
        self._update = update
        self._group_of = group_of
        self._groups = 1 + max(group_of.values())
        self._next_group = 0
        self._step: Update | None = None
        self._error: BaseException | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether an update is left."""
        return self._step is not None

    def begin(self, update: Update) -> None:
        """Notes a step whose updates are to be made. Those of the step before must have been."""
        self.finish()
        self._step, self._next_group = update, 0

    def reach(self, unit: str) -> None:
        """Makes the updates that are left, up to that of `unit`."""
        if self._step is not None:
            self._make(self._step, self._group_of[unit] + 1)

    def finish(self) -> None:
        """Makes all updates that are left. They need no other rank."""
        if self._step is not None:
            self._make(self._step, self._groups)

    def _make(self, update: Update, stop: int) -> None:
        if self._error is not None:
            raise RuntimeError("an earlier update on the host failed, so the weights are those of no step") from self._error
        try:
            while self._next_group < stop:
                self._update(self._next_group, update)
                self._next_group += 1
        except BaseException as error:
            self._error = error
            raise
        if self._next_group == self._groups:
            self._step = None
