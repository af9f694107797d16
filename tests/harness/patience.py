"""How long a test waits for something that takes a moment on a quiet machine, and a clock that stands still until something has lived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE_SECONDS = 300.0  # of a machine that is busy with other work; a test fails at once where it can


def wait_until(is_so: Callable[[], bool], otherwise: str, pause_seconds: float = 0.02) -> None:
    """Returns as soon as is_so(). Raises TimeoutError with the text `otherwise` if that does not happen within PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(pause_seconds)


class SetClock:
    """Stands for the module `time` in a module under test: `now` is what the test says, and a sleep is short.

    sleepers: the threads that have slept.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.sleepers: set[threading.Thread] = set()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleepers.add(threading.current_thread())
        time.sleep(min(seconds, 0.01))


class ClockOfLife(SetClock):
    """Each sleep waits for a new sign of life, and then takes `seconds_per_sign`. So a sign is never late, however busy the machine is.

    sign: a value that changes with every sign. `has_ended` is set by the test when no more signs come; then the clock stands still.
    """

    def __init__(self, sign: Callable[[], object], seconds_per_sign: float) -> None:
        super().__init__()
        self._sign, self._seconds_per_sign = sign, seconds_per_sign
        self.has_ended = threading.Event()

    def sleep(self, seconds: float) -> None:
        before = self._sign()
        wait_until(lambda: self._sign() != before or self.has_ended.is_set(), "no sign of life", pause_seconds=0.001)
        if self._sign() != before:
            self.now += self._seconds_per_sign
