"""Tells a second Ctrl-C from the signals that the first one causes.

A terminal interrupts every process of its foreground group. A launcher among them sends the signal to its ranks again, as SIGINT or as
SIGTERM: one Ctrl-C may reach a rank several times.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

INTERRUPTED_EXIT_CODE = 130
SAME_PRESS_SECONDS = 1.0


class Interrupts:
    """The interrupts of this process."""

    def __init__(self) -> None:
        self._first_seconds: float | None = None

    def is_first(self, number: int) -> bool:
        """Whether this signal is the first SIGINT. A second Ctrl-C, which torchrun passes on as SIGTERM, ends the process at once."""
        now = time.monotonic()
        if self._first_seconds is None:
            self._first_seconds = now if number == signal.SIGINT else None
            return number == signal.SIGINT
        if number in (signal.SIGINT, signal.SIGTERM) and now - self._first_seconds > SAME_PRESS_SECONDS:
            os._exit(INTERRUPTED_EXIT_CODE)
        return False

    def raise_first(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGINT. Raises KeyboardInterrupt for the first, and no second one while the process ends."""
        if self.is_first(number):
            raise KeyboardInterrupt
