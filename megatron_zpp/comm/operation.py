"""Runs an operation of the tensor or the context link, at once or beside computation: on the host, or on the streams of a device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from megatron_zpp.comm.backend import Work, naming
from megatron_zpp.comm.streams import Event, Streams
from megatron_zpp.comm.waits import WATCH_SECONDS, Waits


@dataclass(frozen=True)
class Stage:
    """One collective. launch: starts it; returns None if there is nothing to wait for (see Backend). land: uses what has arrived."""

    name: str
    launch: Callable[[], Work | None]
    land: Callable[[], None]


@dataclass(frozen=True)
class Operation:
    """Collectives that follow each other. It holds what they read and write until it is given up."""

    stages: tuple[Stage, ...]


class Runner(Protocol):
    """Runs the operations of one link, one after the other, in the order of the calls."""

    def run(self, operation: Operation) -> None:
        """Runs it. Computation goes on after it."""

    def start(self, operation: Operation) -> Callable[[], None]:
        """Starts it; computation goes on. The result makes computation wait for its end; it must be called, once."""


def make_runner(timer: str, link: str, streams: Streams | None, waits: Waits) -> Runner:
    """The runner on these streams, or on the host if there are none.

    timer: that of monitor.timers for how long computation waits for the link; also the name in ranges of profilers. link: that in errors.
    """
    return HostRunner(timer, link, waits) if streams is None else StreamRunner(timer, link, streams, waits)


class HostRunner:
    """Runs operations on the thread that calls it. Only the first collective of an operation goes on beside computation."""

    def __init__(self, timer: str, link: str, waits: Waits) -> None:
        self._timer = timer
        self._link = link
        self._waits = waits

    def run(self, operation: Operation) -> None:
        self.start(operation)()

    def start(self, operation: Operation) -> Callable[[], None]:
        first, *others = operation.stages
        work = self._send(first)

        def finish() -> None:
            self._arrive(first, work)
            for stage in others:
                self._arrive(stage, self._send(stage))

        return finish

    def _send(self, stage: Stage) -> Work | None:
        with self._range(stage, "send"), naming(self._link):
            return stage.launch()

    def _arrive(self, stage: Stage, work: Work | None) -> None:
        with self._waits.observer.phase(self._timer), self._range(stage, "wait"):
            if work is not None:
                self._wait(work)
        with self._range(stage, "decode"):
            stage.land()

    def _wait(self, work: Work) -> None:
        """Waits, and calls the watch about once a second: gloo's own wait does not, and a rank that never calls is taken for dead."""
        if self._waits.watch is not None:
            ended = threading.Event()
            work.when_ended(ended.set)
            while not ended.wait(WATCH_SECONDS):
                self._waits.watch()
        with naming(self._link):
            work.wait()

    def _range(self, stage: Stage, verb: str) -> AbstractContextManager[object]:
        return self._waits.observer.hop(f"{self._timer} {stage.name} {verb}")


class StreamRunner:
    """Runs operations in the current stream, or beside it in an urgent one. The host never waits.

    All collectives of a communicator are ordered: those of the urgent stream come after what the current stream has been given, and an
    operation in the current stream after the latest one that was started.
    """

    def __init__(self, timer: str, link: str, streams: Streams, waits: Waits) -> None:
        self._timer = timer
        self._link = link
        self._streams = streams
        self._observer = waits.observer
        self._beside = streams.make(is_urgent=True)
        self._latest: Event | None = None  # the end of the operation started last, if the current stream has not waited for it

    def run(self, operation: Operation) -> None:
        with self._observer.phase(self._timer):
            if self._latest is not None:
                self._streams.current().wait_event(self._latest)
                self._latest = None
            self._enqueue(operation)

    def start(self, operation: Operation) -> Callable[[], None]:
        self._beside.wait_stream(self._streams.current())
        with self._streams.entered(self._beside):
            self._enqueue(operation)
            ended = self._latest = self._beside.record_event()

        def finish() -> None:
            with self._observer.phase(self._timer), self._observer.hop(f"{self._timer} {operation.stages[-1].name} wait"):
                self._streams.current().wait_event(ended)
            if self._latest is ended:
                self._latest = None

        return finish

    def _enqueue(self, operation: Operation) -> None:
        for stage in operation.stages:
            with self._observer.hop(f"{self._timer} {stage.name} send"), naming(self._link):
                work = stage.launch()
                if work is not None:
                    work.wait()
            with self._observer.hop(f"{self._timer} {stage.name} decode"):
                stage.land()
