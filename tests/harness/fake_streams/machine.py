"""Streams and events with the rules of CUDA: what happens before what, and at which time.

Happens-before is kept in vector clocks. A stream counts its operations. Its clock says, for every stream, how many of that stream's
operations happen before its next one. An event is a copy of a clock. The host has a clock, too: what a stream does comes after
everything that the host has waited for before it enqueued it.

Times are separate: `spend` gives the current stream work of some length. An operation begins when its stream is free, when the events that
the stream waits for are reached, and when the host enqueues it; the host itself needs no time.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

HARNESS = Path(__file__).parent
ROOT = HARNESS.parents[2]
FOLDERS = tuple(
    ROOT / name for name in ("tests", "testbed", "benchmarks", "megatron_zpp")
)  # of the project; an environment may lie beside them
SERVANTS = ("lanes.py", "observed_lanes.py", "operation.py", "staging.py", "group_link.py", "tensor_link.py", "context_link.py")

Clock = dict[int, int]  # by stream, the number of its operations; a stream that is missing has none


def merge(clock: Clock, other: Clock) -> bool:
    """Makes `clock` come after `other`; returns whether it did not already."""
    news = {stream: count for stream, count in other.items() if clock.get(stream, 0) < count}
    clock.update(news)
    return bool(news)


@dataclass(frozen=True)
class Site:
    """A line of code that calls the machine, and what it calls."""

    call: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.call} at {self.file}:{self.line}"


Sites = tuple[Site, ...]


class Launch(NamedTuple):
    """An operation that the host enqueues. file: the one of the project that asks for it; autograd asks for those of backward."""

    file: str
    operation: str


@dataclass(frozen=True)
class FakeEvent:
    """A point in a stream, when it is reached, and the lines that recorded it."""

    machine: Machine
    clock: Clock
    time: float
    sites: Sites = ()

    def synchronize(self) -> None:
        self.machine.sync(self, sites=calling_sites("synchronize"))


@dataclass(eq=False)
class FakeStream:
    """A stream of `machine`. clock: what happens before its next operation. free_at: when its last operation ends."""

    machine: Machine
    number: int
    name: str
    clock: Clock = field(default_factory=dict)
    free_at: float = 0.0

    def record_event(self) -> FakeEvent:
        sites = calling_sites("record_event")
        return FakeEvent(self.machine, {}, 0.0) if self.machine.leaves_out(sites) else self.event(sites)

    def wait_event(self, event: FakeEvent) -> None:
        self._follow(event, calling_sites("wait_event"))

    def wait_stream(self, stream: FakeStream) -> None:
        self._follow(stream.event(()), calling_sites("wait_stream"))

    def synchronize(self) -> None:
        self.machine.sync(self.event(()), sites=calling_sites("synchronize"))

    def event(self, sites: Sites) -> FakeEvent:
        return FakeEvent(self.machine, dict(self.clock), self.free_at, sites)

    def _follow(self, event: FakeEvent, sites: Sites) -> None:
        """Makes the stream's next operation come after the event."""
        if self.machine.leaves_out(sites):
            return
        if merge(self.clock, event.clock):
            self.machine.needed.update((*sites, *event.sites))
        if self is self.machine.compute:
            self.machine.waits += max(0.0, event.time - self.free_at)
        self.free_at = max(self.free_at, event.time)

    def advance(self) -> int:
        """Enqueues an operation; returns its number in this stream."""
        merge(self.clock, self.machine.host_clock)
        self.free_at = max(self.free_at, self.machine.host_time)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]


class Machine:
    """The GPU of one rank; implements comm.streams.Streams. Only the thread of that rank uses it.

    without: a line whose waits or records have no effect, for tests that such a fault is found.
    streams: of the whole GPU, by number; given if ranks share it.
    needed: the lines whose waits or records changed what happens before what. A stream that waits for itself, for example, changes nothing.
    log: what the host did, in order: operations that it enqueued, and lines at which it waited for streams.
    waits: the time for which computation stood still.
    """

    def __init__(self, without: Site | None = None, streams: list[FakeStream] | None = None) -> None:
        self.streams: list[FakeStream] = [] if streams is None else streams
        self.compute = self._make("compute")
        self._current = self.compute
        self.host_clock: Clock = {}
        self.host_time = 0.0
        self.waits = 0.0
        self.needed: set[Site] = set()
        self.log: list[Launch | Site] = []
        self._host_storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._without = without

    # ---- comm.streams.Streams

    def make(self, *, is_urgent: bool = False) -> FakeStream:
        return self._make(f"urgent {len(self.streams)}" if is_urgent else f"stream {len(self.streams)}")

    def current(self) -> FakeStream:
        return self._current

    @contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self) -> None:
        self.sync(*(stream.event(()) for stream in self._own()), sites=calling_sites("synchronize"))

    def host_memory(self, numel: int, dtype: torch.dtype, *, is_pinned: bool = True) -> Tensor:
        with _disable_current_modes():  # no operation of the device
            memory = torch.zeros(numel, dtype=dtype)
        self.put_on_host(memory)
        return memory

    # ---- for the harness

    def read(self, stream: FakeStream) -> None:
        """The host reads a value that `stream` computes, so it waits for it."""
        self.log += calling_sites("read")[:1]
        merge(self.host_clock, stream.clock)
        self.host_time = max(self.host_time, stream.free_at)

    def sync(self, *events: FakeEvent, sites: Sites) -> None:
        """Lets the host wait for these events."""
        if self.leaves_out(sites):
            return
        self.log += sites[:1]
        if any([merge(self.host_clock, event.clock) for event in events]):
            self.needed.update((*sites, *(site for event in events for site in event.sites)))
        self.host_time = max([self.host_time, *(event.time for event in events)])

    def put_on_host(self, tensor: Tensor) -> None:
        """The tensor's memory is that of the host."""
        self._host_storages.add(tensor.untyped_storage())

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether the tensor is in memory of the host, which streams reach too."""
        return tensor.untyped_storage() in self._host_storages

    def spend(self, time: float) -> None:
        """An operation of this length in the current stream."""
        self._current.advance()
        self._current.free_at += time

    def leaves_out(self, sites: Sites) -> bool:
        """Whether a call from these lines shall have no effect."""
        return self._without in sites

    def unfinished(self) -> list[str]:
        """The streams whose work the host has not waited for."""
        return [stream.name for stream in self._own() if self.host_clock.get(stream.number, 0) < stream.clock.get(stream.number, 0)]

    def happens_before(self, stream: int, count: int, other: FakeStream) -> bool:
        """Whether operation `count` of `stream` is done before the next operation of `other`."""
        return other.clock.get(stream, 0) >= count or self.is_seen(stream, count)

    def is_seen(self, stream: int, count: int) -> bool:
        """Whether the host has waited for operation `count` of `stream`."""
        return self.host_clock.get(stream, 0) >= count

    def _own(self) -> list[FakeStream]:
        """The streams of this rank."""
        return [stream for stream in self.streams if stream.machine is self]

    def _make(self, name: str) -> FakeStream:
        stream = FakeStream(self, len(self.streams), name)
        self.streams.append(stream)
        return stream


def calling_sites(call: str) -> Sites:
    """The line of the project that makes the call, and if that is in comm/'s lanes, staging or links, the line that called these.

    A wait in a lane serves many callers, and each of them is a site of its own.
    """
    sites: list[Site] = []
    for frame, name in _frames_of_the_project():
        sites.append(Site(call, name, frame.f_lineno))
        if name not in SERVANTS:
            break
    return tuple(sites)


def asking_file() -> str:
    """The innermost file of the project that is being run; "autograd" while it runs backward."""
    for frame, name in _frames_of_the_project():
        return "autograd" if (name, frame.f_code.co_name) == ("training_pass.py", "backward") else name
    return ""


def _frames_of_the_project() -> Iterator[tuple[FrameType, str]]:
    """The frames that run files of the project, innermost first, with the names of these files."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = _name_in_the_project(frame.f_code.co_filename)
        if name:
            yield frame, name
        frame = frame.f_back


@cache
def _name_in_the_project(file: str) -> str:
    path = Path(file)
    is_of_it = any(folder in path.parents for folder in FOLDERS) and path.parent != HARNESS
    return path.name if is_of_it else ""
