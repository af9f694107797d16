"""Hops over lanes: who may send when, so that every rank sends the same messages in the same order and none waits in a circle.

A climb or a descent is a chain of hops, each one collective on one lane; a hop names the hop before it. Three rules hold on every rank:
a lane carries its hops first in, first out, in the order of submission; a hop is launched once it heads its lane and the hop before it
has landed; waiting for one hop moves all lanes along. An error in one hop fails every hop that has not landed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from megatron_zpp.comm.backend import Work, naming
from megatron_zpp.comm.ledger import Traffic
from megatron_zpp.parallel.topology import LANES, Lane

_FIRST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 500e-6
_WATCH_SECONDS = 1.0

Result = TypeVar("Result")


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Hop:
    """One collective on one lane.

    launch: encodes and starts the collective; None means that there is nothing to send.
    land: decodes what has arrived.
    after: the hop whose landing this one needs.
    traffic: what the collective brings to this rank; booked by whoever waits for it.
    """

    name: str
    lane: Lane
    launch: Callable[[], Work | None]
    land: Callable[[], None]
    after: Hop | None = None
    traffic: Traffic = Traffic()
    has_landed: bool = False
    work: Work | None = field(default=None, repr=False)
    is_launched: bool = False
    event: Any = field(default=None, repr=False)


class Lanes(Protocol):
    """What the engine sees: submit hops in the order of the static schedule, wait for the ones whose results it needs."""

    def submit(self, hop: Hop) -> None: ...

    def wait(self, hop: Hop) -> None: ...

    def drain(self) -> None: ...


def make_lanes(device: torch.device, watch: Callable[[], None]) -> Lanes:
    """Streams on CUDA, polled handles elsewhere.

    watch: raises once another rank is known to have failed. On CUDA the host does not wait, so there the launcher, or NCCL's timeout,
    ends the others.
    """
    return StreamLanes(device) if device.type == "cuda" else PolledLanes(watch=watch)


class PolledLanes:
    """Lanes of asynchronous handles, moved along by whoever submits or waits; one collective under way per lane.

    pause: called before every launch; tests pass random delays.
    watch: called now and then in a long wait; raises once another rank is known to have failed, since a message from that rank, or from
    one that waits for it, will never come.
    """

    def __init__(self, pause: Callable[[], None] = _nothing, watch: Callable[[], None] = _nothing) -> None:
        self._queues: dict[Lane, deque[Hop]] = {lane: deque() for lane in LANES}
        self._pause = pause
        self._watch = watch
        self._error: BaseException | None = None

    def submit(self, hop: Hop) -> None:
        self._queues[hop.lane].append(hop)
        self._progress()

    def wait(self, hop: Hop) -> None:
        self._wait_until(lambda: hop.has_landed)

    def drain(self) -> None:
        """Waits until every submitted hop has landed."""
        self._wait_until(lambda: not any(self._queues.values()))

    def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        next_watch = time.monotonic() + _WATCH_SECONDS
        while not is_reached():
            if self._progress():
                pause_seconds = _FIRST_PAUSE_SECONDS
            elif not is_reached():
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
                if time.monotonic() > next_watch:
                    self._keeping_errors(self._watch)
                    next_watch = time.monotonic() + _WATCH_SECONDS

    def _progress(self) -> bool:
        """True where at least one hop was launched or landed."""
        if self._error is not None:
            raise RuntimeError("an earlier collective of this rank failed") from self._error
        has_moved = False
        while any(self._keeping_errors(self._progress_lanes)):
            has_moved = True
        return has_moved

    def _keeping_errors(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except BaseException as error:
            self._error = error
            raise

    def _progress_lanes(self) -> list[bool]:
        return [self._progress_lane(queue) for queue in self._queues.values()]

    def _progress_lane(self, queue: deque[Hop]) -> bool:
        if not queue:
            return False
        hop = queue[0]
        if hop.is_launched:
            return self._land(queue, hop)
        if hop.after is not None and not hop.after.has_landed:
            return False
        self._pause()
        hop.is_launched = True
        hop.work = hop.launch()
        return True

    def _land(self, queue: deque[Hop], hop: Hop) -> bool:
        if hop.work is not None:
            if not hop.work.is_completed():
                return False
            with naming(f"unit {hop.name}, lane {hop.lane}"):
                hop.work.wait()
        hop.land()
        hop.work = None
        hop.has_landed = True
        queue.popleft()
        return True


class StreamLanes:
    """Lanes as CUDA side streams: a hop is enqueued when submitted, and waiting for it makes the compute stream wait for its event.

    Buffers are allocated and freed on the compute stream; a lane waits for that stream before it touches them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {lane: torch.cuda.Stream(device) for lane in LANES}

    def submit(self, hop: Hop) -> None:
        stream = self._streams[hop.lane]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if hop.after is not None:
            stream.wait_event(hop.after.event)
        with torch.cuda.stream(stream):
            work = hop.launch()
            if work is not None:
                work.wait()
            hop.land()
            hop.event = stream.record_event()
        hop.is_launched = hop.has_landed = True

    def wait(self, hop: Hop) -> None:
        torch.cuda.current_stream(self._device).wait_event(hop.event)

    def drain(self) -> None:
        """Returns once the device has finished every lane."""
        torch.cuda.synchronize(self._device)
