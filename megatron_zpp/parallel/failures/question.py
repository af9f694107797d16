"""Asks the store: in a thread of its own, because its client blocks forever if the host of the store is stopped or cut off; many entries in
one question; and the same again after pauses that grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Generic, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.02, 1.0


def pauses() -> Iterator[float]:
    """Seconds to wait before asking the same again, each time twice as long up to a second: so a thousand ranks that wait ask little."""
    seconds = FIRST_PAUSE_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, LAST_PAUSE_SECONDS)


def counts_of(store: dist.Store, keys: Sequence[str]) -> list[int]:
    """How far each entry has been counted: one question for thousands of them, if all are there. Those that are not are made, with 0."""
    names = list(keys)
    if names and store.check(names):
        return [int(count) for count in store.multi_get(names)]
    return [store.add(name, 0) for name in names]


class NoAnswer(RuntimeError):
    """The store has not answered in time."""


class Question(Thread, Generic[Answer]):
    """Runs a call in its own thread at once; `answer` or `error` is set when the thread has ended. It may be abandoned."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.answer: Answer | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._call()
        except Exception as error:  # whoever asked raises it
            self.error = error


def answer_within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """What the call returns or raises. Raises NoAnswer after the time; the call is left alone then."""
    question = Question(call)
    question.join(seconds)
    if question.is_alive():
        raise NoAnswer(f"the store of the run has not answered for {seconds:.0f} s")
    if question.error is not None:
        raise question.error
    return question.answer  # type: ignore[return-value]  # the call has returned it
