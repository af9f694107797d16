"""Lanes run hops so that every rank sends the same messages in the same order and no deadlock can arise.

A climb or a descent is a chain of hops; a hop names the hop that must land before it (`after`). Three rules hold on every rank:
- A lane prepares, launches and lands its hops in the order in which they were submitted.
- A hop is prepared after the hop that it names has landed. It waits for nothing else on other lanes.
- At most MOST_CROSSING collectives of a lane are under way.
If one hop fails, every hop that has not landed fails with it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from megatron_zpp.comm.backend import Work, naming
from megatron_zpp.comm.ledger import Traffic
from megatron_zpp.comm.moves import Move, Times, first_move
from megatron_zpp.comm.streams import Streams
from megatron_zpp.comm.waits import WATCH_SECONDS
from megatron_zpp.parallel.topology import LANES, Lane


def nothing() -> None:
    """Does nothing: for hops that have nothing to prepare, send or decode."""


@dataclass(eq=False)
class Hop(Times):
    """One collective on one lane.

    launch: starts the collective; returns None if there is nothing to wait for (see Backend), or nothing to send.
    land: decodes what has arrived.
    after: the hop that must land before this one is prepared.
    traffic: the bytes that the collective brings to this rank; the caller that waits for the hop books them.
    prepare: encodes what is sent; may run while the lane's collective before this one is under way.
    """

    name: str
    lane: Lane
    launch: Callable[[], Work | None]
    land: Callable[[], None]
    after: Hop | None = None
    traffic: Traffic = Traffic()
    prepare: Callable[[], None] = nothing
    work: Work | None = field(default=None, repr=False)
    event: Any = field(default=None, repr=False)


class Lanes(Protocol):
    """What the engine needs of lanes: it submits hops in the order of its schedule, and waits for those whose results it needs."""

    def submit(self, hop: Hop) -> None: ...

    def wait(self, hop: Hop) -> None: ...

    def drain(self) -> None: ...


def make_lanes(streams: Streams | None, watch: Callable[[], None] = nothing) -> Lanes:
    """Lanes on the streams of a device, or in a thread where there are none.

    watch: raises if another rank has failed. It is not used on CUDA, where the host does not wait: there the launcher or NCCL's timeout
    ends the other ranks.
    """
    return ThreadLanes(watch=watch) if streams is None else StreamLanes(streams)


class ThreadLanes:
    """Lanes that one thread moves along, beside computation.

    To keep links busy, the next hop of a lane is prepared while MOST_CROSSING collectives are under way. When one of them has
    ended, the next is started before the ended one is decoded.
    pause: called before a hop is prepared; tests pass random delays.
    watch: called now and then during a long wait. It raises if another rank has failed, because a message from that rank, or from one that
    waits for it, will never come.
    """

    def __init__(self, pause: Callable[[], None] = nothing, watch: Callable[[], None] = nothing) -> None:
        self._mover = _Mover(pause)
        self._watch = watch
        self._is_started = False

    def submit(self, hop: Hop) -> None:
        self._start()
        with self._mover.lock:
            self._mover.raise_error()
            hop.submitted = time.monotonic()
            self._mover.queues[hop.lane].append(hop)
            self._mover.changed.notify_all()

    def wait(self, hop: Hop) -> None:
        if not hop.has_landed:
            self._wait_until(lambda: hop.has_landed)

    def drain(self) -> None:
        """Waits until every submitted hop has landed."""
        self._wait_until(lambda: not any(self._mover.queues.values()))

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._mover.run, name="lanes", daemon=True).start()
            weakref.finalize(self, self._mover.end)

    def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        mover = self._mover
        while True:
            with mover.lock:
                if is_reached():
                    return
                mover.raise_error()
                has_changed = mover.landed.wait(WATCH_SECONDS)
            if not has_changed:
                try:
                    self._watch()
                except BaseException as error:
                    mover.fail(error, is_raised=True)
                    raise


class _Mover:
    """The thread of the lanes and its state, which `lock` guards. It must not refer to ThreadLanes, whose garbage collection ends it.

    changed: a hop was submitted or has crossed, so that the thread may have a move. landed: a hop has landed, so that a wait may be over.
    Neither wakes who waits for the other. queues: by lane, the hops that have not landed. comm/moves.py chooses the next move.
    """

    def __init__(self, pause: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.landed = threading.Condition(self.lock)
        self.queues: dict[Lane, deque[Hop]] = {lane: deque() for lane in LANES}
        self._pause = pause
        self._error: BaseException | None = None
        self._is_raised = False
        self._has_ended = False

    def raise_error(self) -> None:
        """Raises the error that stopped the lanes: the error itself at first, later a RuntimeError that names it as its cause."""
        if self._error is None:
            return
        if self._is_raised:
            raise RuntimeError("an earlier collective of this rank failed") from self._error
        self._is_raised = True
        raise self._error

    def fail(self, error: BaseException, *, is_raised: bool = False) -> None:
        """Stops the lanes. is_raised: the error has been raised to a caller."""
        with self.lock:
            if self._error is None:
                self._error, self._is_raised = error, is_raised
            self.changed.notify_all()
            self.landed.notify_all()

    def end(self) -> None:
        with self.lock:
            self._has_ended = True
            self.changed.notify_all()

    @torch.no_grad()  # no_grad holds for one thread only
    def run(self) -> None:
        """Moves hops along until the lanes end or fail."""
        while (move := self._next_move()) is not None:
            try:
                move()
            except BaseException as error:
                self.fail(error)
                return
            del move  # a hop refers to the lanes, so while this thread waits it must hold none, or they would never be collected

    def _next_move(self) -> Callable[[], None] | None:
        with self.lock:
            while not self._has_ended and self._error is None:
                found = first_move(self.queues.values(), time.monotonic())  # every possible move can start now, so the kind of move decides
                if found is not None:
                    move = self._launch if found.move is Move.LAUNCH else self._land if found.move is Move.LAND else self._prepare
                    return partial(move, found.hop)
                self.changed.wait()
        return None

    def _prepare(self, hop: Hop) -> None:
        self._pause()
        hop.prepare()
        hop.prepared = time.monotonic()

    def _launch(self, hop: Hop) -> None:
        hop.work = hop.launch()
        hop.launched = time.monotonic()
        if hop.work is None:
            hop.crossed = hop.launched
        else:
            hop.work.when_ended(lambda: self._crossed(hop))

    def _land(self, hop: Hop) -> None:
        if hop.work is not None:
            with naming(f"unit {hop.name}, lane {hop.lane}"):
                hop.work.wait()
        hop.land()
        hop.work = None
        with self.lock:
            hop.landed = time.monotonic()
            self.queues[hop.lane].popleft()
            self.landed.notify_all()

    def _crossed(self, hop: Hop) -> None:
        with self.lock:
            hop.crossed = time.monotonic()
            self.changed.notify_all()


class StreamLanes:
    """Lanes as streams: a hop is enqueued when submitted, and waiting for it makes the stream of computation wait for its event.

    Rungs are allocated and freed on the stream of computation, and a lane waits for that stream before it touches them. Other buffers are
    taken on the lane's own stream; comm/staging.py makes the next taker wait for their last use. The kernels of lanes are short and links
    wait for them, so they go before waiting kernels of computation.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._of_lane = {lane: streams.make(is_urgent=True) for lane in LANES}

    def submit(self, hop: Hop) -> None:
        stream = self._of_lane[hop.lane]
        stream.wait_stream(self._streams.current())
        if hop.after is not None:
            stream.wait_event(hop.after.event)
        with self._streams.entered(stream):
            hop.prepare()
            with naming(f"unit {hop.name}, lane {hop.lane}"):
                work = hop.launch()
                if work is not None:
                    work.wait()
            hop.land()
            hop.event = stream.record_event()
        # The host has nothing left to do for this hop.
        hop.submitted = hop.prepared = hop.launched = hop.crossed = hop.landed = time.monotonic()

    def wait(self, hop: Hop) -> None:
        self._streams.current().wait_event(hop.event)

    def drain(self) -> None:
        """Returns once the device has finished every lane."""
        self._streams.synchronize()
