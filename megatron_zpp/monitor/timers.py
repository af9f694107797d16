"""Measures the parts of a step with Megatron's timers, and prints them in Megatron's format."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

# By name, the lowest --timing-log-level at which the timer runs. Names are Megatron's; those that end in a link time the wait for it.
TIMER_LEVELS = {
    "forward-backward": 1,
    "batch-generator": 2,
    "forward-compute": 2,
    "backward-compute": 2,
    "params-all-gather-inter": 2,
    "params-all-gather-intra": 2,
    "grads-reduce-scatter-intra": 2,
    "grads-reduce-scatter-inter": 2,
    "tensor-link": 2,
    "context-link": 2,
    "all-grads-sync": 1,
    "optimizer": 1,
    "optimizer-clip-main-grad": 1,
    "optimizer-count-zeros": 1,
    "optimizer-inner-step": 1,
    "eval-time": 1,
    "save-checkpoint": 1,
}
TIMER_NAMES = tuple(TIMER_LEVELS)
# Not part of a step: timers inside them do not count, and they are reported when they end.
BETWEEN_STEPS = ("eval-time", "save-checkpoint")
NEVER_RAN = -1.0

_NAME_WIDTH = 48
_HEADERS = {
    "max": "max time across ranks (ms):",
    "minmax": "(min, max) time across ranks (ms):",
    "all": "times across ranks (ms):",
}


class Clock(Protocol):
    """Measures time between marks."""

    def mark(self) -> Any:
        """A mark of the current moment."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two marks; waits until the second has been reached."""


class HostClock:
    """Measures time on the host."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class StreamClock:
    """Measures time on the current CUDA stream with events; a mark blocks neither host nor device."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        stop.synchronize()
        return start.elapsed_time(stop) / 1000.0


def clock_of(device: torch.device) -> Clock:
    """The clock of the compute stream on CUDA, else that of the host."""
    return StreamClock() if device.type == "cuda" else HostClock()


class Timers:
    """Sums up this rank's seconds in each timer up to a level. `running` is a Span of monitor.observer."""

    def __init__(self, level: int, clock: Clock) -> None:
        self._level = level
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._unsettled: list[tuple[str, Any, Any]] = []
        self._is_between_steps = False

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Adds the time of the block to the timer `name`, unless the timer is above the level or runs inside one of BETWEEN_STEPS."""
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
        """Adds up the marked times. It waits for the device, so call it after something else has waited."""
        for name, start, stop in self._unsettled:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock.seconds(start, stop)
        self._unsettled = []

    def take(self, names: Sequence[str]) -> list[float]:
        """Seconds of each timer since it was last taken; NEVER_RAN for those that did not run."""
        self.settle()
        return [self._seconds.pop(name, NEVER_RAN) for name in names]


def timer_lines(option: str, milliseconds: dict[str, list[float]]) -> str:
    """The lines that Megatron prints for --timing-log-option; an empty string if no timer ran.

    milliseconds: of each timer that ran, one per rank.
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
