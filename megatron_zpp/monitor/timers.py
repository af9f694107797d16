"""Megatron's timers: how long the parts of a step take, printed in Megatron's format."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

# By name, the --timing-log-level from which on it runs. Names are Megatron's; those that end in a link are times waited for that link.
TIMER_LEVELS = {
    "forward-backward": 1,
    "batch-generator": 2,
    "forward-compute": 2,
    "backward-compute": 2,
    "params-all-gather-inter": 2,
    "params-all-gather-intra": 2,
    "grads-reduce-scatter-intra": 2,
    "grads-reduce-scatter-inter": 2,
    "all-grads-sync": 1,
    "optimizer": 1,
    "optimizer-clip-main-grad": 1,
    "optimizer-count-zeros": 1,
    "optimizer-inner-step": 1,
    "eval-time": 1,
    "save-checkpoint": 1,
}
TIMER_NAMES = tuple(TIMER_LEVELS)
# Not part of a step: what runs inside them is not counted as such, and they are reported when they end.
BETWEEN_STEPS = ("eval-time", "save-checkpoint")
NEVER_RAN = -1.0

_NAME_WIDTH = 48
_HEADERS = {
    "max": "max time across ranks (ms):",
    "minmax": "(min, max) time across ranks (ms):",
    "all": "times across ranks (ms):",
}


class Clock(Protocol):
    """Marks moments."""

    def mark(self) -> Any:
        """This moment."""

    def seconds(self, start: Any, stop: Any) -> float:
        """From one mark to another; waits until the second has come."""


class HostClock:
    """Moments of the host."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class StreamClock:
    """Moments of the current CUDA stream, as events: marking one stops neither host nor device."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        stop.synchronize()
        return start.elapsed_time(stop) / 1000.0


def clock_of(device: torch.device) -> Clock:
    """Of the compute stream on CUDA, of the host elsewhere."""
    return StreamClock() if device.type == "cuda" else HostClock()


class Timers:
    """Seconds of this rank by timer, up to a level; `running` is a span of monitor.observer."""

    def __init__(self, level: int, clock: Clock) -> None:
        self._level = level
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._unsettled: list[tuple[str, Any, Any]] = []
        self._is_between_steps = False

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Adds to the timer `name` what the block takes; above the level, and within BETWEEN_STEPS, nothing."""
        if TIMER_LEVELS[name] > self._level or self._is_between_steps:
            yield
            return
        self._is_between_steps = name in BETWEEN_STEPS
        start = self._clock.mark()
        try:
            yield
        finally:
            self._unsettled.append((name, start, self._clock.mark()))
            self._is_between_steps = False

    def settle(self) -> None:
        """Adds up what was marked; to be called where the device has been waited for anyway."""
        for name, start, stop in self._unsettled:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock.seconds(start, stop)
        self._unsettled = []

    def take(self, names: Sequence[str]) -> list[float]:
        """Seconds of each since they were last taken, NEVER_RAN for those that did not run."""
        self.settle()
        return [self._seconds.pop(name, NEVER_RAN) for name in names]


def timer_lines(option: str, milliseconds: dict[str, list[float]]) -> str:
    """The block that Megatron prints under --timing-log-option; an empty string where no timer ran.

    milliseconds: by timer that ran, the time of each rank.
    """
    if not milliseconds:
        return ""
    return _HEADERS[option] + "".join(_timer_lines(option, name, of_ranks) for name, of_ranks in milliseconds.items())


def _timer_lines(option: str, name: str, of_ranks: list[float]) -> str:
    if option == "all":
        return f"\n  {name}:" + "".join(f"\n     rank {rank:2d}: {time:.2f}" for rank, time in enumerate(of_ranks))
    label = f"\n    {f'{name} '.ljust(_NAME_WIDTH, '.')}: "
    if option == "max":
        return f"{label}{max(of_ranks):.2f}"
    return f"{label}({min(of_ranks):.2f}, {max(of_ranks):.2f})"
