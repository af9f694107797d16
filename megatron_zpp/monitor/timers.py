"""Named stopwatches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _nothing_to_wait_for() -> None:
    pass


class Timer:
    """A stopwatch that adds up the seconds between start and stop."""

    def __init__(self, name: str, synchronize: Callable[[], None], now: Callable[[], float]) -> None:
        self.name = name
        self._synchronize = synchronize
        self._now = now
        self._started_at: float | None = None
        self._elapsed_seconds = 0.0

    def start(self) -> None:
        """Raises RuntimeError if the timer runs."""
        if self._started_at is not None:
            raise RuntimeError(f"timer {self.name} was started twice without a stop")
        self._synchronize()
        self._started_at = self._now()

    def stop(self) -> None:
        """Raises RuntimeError if the timer does not run."""
        if self._started_at is None:
            raise RuntimeError(f"timer {self.name} was stopped without a start")
        self._synchronize()
        self._elapsed_seconds += self._now() - self._started_at
        self._started_at = None

    def elapsed_seconds(self, *, reset: bool = True) -> float:
        """Seconds measured since the last reset, those of a running timer included; it runs on."""
        is_running = self._started_at is not None
        if is_running:
            self.stop()
        elapsed_seconds = self._elapsed_seconds
        if reset:
            self._elapsed_seconds = 0.0
        if is_running:
            self.start()
        return elapsed_seconds


class Timers:
    """Timers by name, made when first asked for: `timers("forward-backward").start()`.

    synchronize: waits for the device before each reading of the clock, such as `torch.cuda.synchronize`; nothing by default.
    """

    def __init__(self, synchronize: Callable[[], None] = _nothing_to_wait_for, now: Callable[[], float] = time.perf_counter) -> None:
        self._synchronize = synchronize
        self._now = now
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        if name not in self._timers:
            self._timers[name] = Timer(name, self._synchronize, self._now)
        return self._timers[name]

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """The timer of that name runs inside the with-block, also when the block raises."""
        self(name).start()
        try:
            yield
        finally:
            self(name).stop()
