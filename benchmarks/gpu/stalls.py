"""Streams that measure how long each wait holds them up, by the line that waits: a wait for a hop, or for a buffer of staging.

A mark before the wait and one behind it are reached at once if there was nothing to wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.comm.streams import Stream, Streams

SHORTEST_SECONDS = 5e-6  # shorter ones are the marks themselves


class Marks:
    """Points in a CUDA stream that can be timed."""

    def mark(self, stream: Any) -> Any:
        return stream.record_event(torch.cuda.Event(enable_timing=True))

    def seconds(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3


@dataclass(frozen=True)
class Stall:
    """A wait of one stream. where: file, function and lane."""

    where: str
    is_compute: bool
    before: Any
    after: Any


@dataclass
class MeasuredStreams:
    """The streams `inner` of a device. The one that is current when this is made is that of computation.

    is_recording: without it, waits are as they are.
    """

    inner: Streams
    marks: Any = field(default_factory=Marks)
    is_recording: bool = False
    stalls: list[Stall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compute = self.inner.current()

    def make(self, *, is_urgent: bool = False) -> Stream:
        return MeasuredStream(self.inner.make(is_urgent=is_urgent), self)

    def current(self) -> Stream:
        return MeasuredStream(self.inner.current(), self)

    def entered(self, stream: Any) -> AbstractContextManager[object]:
        return self.inner.entered(stream.inner)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def host_memory(self, numel: int, dtype: torch.dtype, *, is_pinned: bool = True) -> Tensor:
        return self.inner.host_memory(numel, dtype, is_pinned=is_pinned)

    def measured(self, stream: Any, wait: Callable[[], None]) -> None:
        """Calls `wait`, which makes the stream wait, between two marks."""
        if not self.is_recording:
            wait()
            return
        where, before = _caller(), self.marks.mark(stream)
        wait()
        self.stalls.append(Stall(where, stream == self.compute, before, self.marks.mark(stream)))

    def take(self) -> dict[str, float]:
        """Seconds of computation's stalls since the last call, by place, longest first. The device must have done its work."""
        stalls, self.stalls = self.stalls, []
        seconds: dict[str, float] = {}
        for stall in stalls:
            if stall.is_compute:
                length = self.marks.seconds(stall.before, stall.after)
                seconds[stall.where] = seconds.get(stall.where, 0.0) + (length if length >= SHORTEST_SECONDS else 0.0)
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class MeasuredStream:
    """A stream whose waits are measured. Two for the same stream are equal, as streams are."""

    inner: Any
    streams: MeasuredStreams = field(compare=False, repr=False)

    def record_event(self) -> Any:
        return self.inner.record_event()

    def wait_event(self, event: Any) -> None:
        self.streams.measured(self.inner, lambda: self.inner.wait_event(event))

    def wait_stream(self, stream: Any) -> None:
        self.streams.measured(self.inner, lambda: self.inner.wait_stream(stream.inner))

    def synchronize(self) -> None:
        self.inner.synchronize()


def _caller() -> str:
    """File and function that wait, with the lane of the hop if there is one."""
    frame = sys._getframe(3)
    lane = getattr(frame.f_locals.get("hop"), "lane", None)
    where = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
    return where if lane is None else f"{where} {lane}"
