"""Puts the updates of a step off until the next forward needs them, for an optimizer on the host.

    host      norm | AdamW 0 1 2 | launch use 0, AdamW 3 | launch use 1, AdamW 4 | launch use 2 ...
    device                                 use 0                   use 1                  use 2

A unit is updated just before its next climb is submitted, by the thread that enqueues the work of the device. So the device computes what
has been enqueued while the host updates. A second thread would save no more: this one has nothing else to do meanwhile, both would compete
for the interpreter, and on a CPU for the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class LaterUpdates:
    """The updates of the last step that have not been made. Main weights, moments and sums of gradients may be read after `finish` alone.

    An update that fails raises its error where it was needed; from then on every call raises a RuntimeError that names it as its cause.
    """

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        """groups: the units that are updated together, in the order of updates."""
        self._group_of = {unit: number for number, units in enumerate(groups) for unit in units}
        self._groups = len(groups)
        self._next_group: int  # of the step that was noted last
        self._update: Callable[[int], None] | None = None
        self._error: BaseException | None = None

    def check_finished(self) -> None:
        """Raises RuntimeError if an update is left: it would change main weights that have just been written."""
        if self._update is not None:
            raise RuntimeError("main weights were written before the last step's updates were made; call engine.finish_updates() first")

    def begin(self, update: Callable[[int], None]) -> None:
        """Notes a step whose updates are to be made. update: makes that of one group. Those of the step before must have been made."""
        self.finish()
        self._update, self._next_group = update, 0

    def reach(self, unit: str) -> None:
        """Makes the updates that are left, up to that of `unit`."""
        if self._update is not None:
            self._make(self._update, self._group_of[unit] + 1)

    def finish(self) -> None:
        """Makes all updates that are left."""
        if self._update is not None:
            self._make(self._update, self._groups)

    def _make(self, update: Callable[[int], None], stop: int) -> None:
        if self._error is not None:
            raise RuntimeError("an earlier update on the host failed, so the weights are those of no step") from self._error
        try:
            while self._next_group < stop:
                update(self._next_group)
                self._next_group += 1
        except BaseException as error:
            self._error = error
            raise
        if self._next_group == self._groups:
            self._update = None
