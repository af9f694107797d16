"""Tells all ranks, through the store of torch.distributed, that one has failed. No rank hangs if the store stops answering."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

import torch.distributed as dist

FAILURE_KEY = "failure"
REPORTS_KEY = "failure_reports"
REPORT_SECONDS = 5.0  # how long rank 0, which may host the store, waits for the others to read the first failure
SIGN_SECONDS = 3.0  # longer than the time between two calls of `check` by a waiting rank
ANSWER_SECONDS = 0.2  # how long `check` waits for the store before it returns

Answer = TypeVar("Answer")


class FailureBoard:
    """Shares the first failure of a run among its ranks. A rank that waits for others must call `check` now and then as a sign of life.

    A store's client blocks forever if the connection is cut, so every request runs in a thread of its own, which may be abandoned.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._look: _Question[bool] | None = None

    def report(self, text: str) -> str:
        """Reports `text`; returns the first failure that any rank has reported, or this one if the store does not answer.

        The first failure also names the ranks that show no sign of life: waiting for them may be why the others failed.
        """
        own = f"rank {self._rank}: {text}"
        question = _Question(lambda: self._report(own))
        question.join(SIGN_SECONDS + REPORT_SECONDS + ANSWER_SECONDS)
        return own if question.is_alive() or question.error is not None else question.answer or own

    def check(self) -> None:
        """Raises RuntimeError if another rank has reported a failure, or if the store is lost.

        Must be called repeatedly: if the store answers slowly, a later call finds the answer.
        """
        if self._look is None:
            self._look = _Question(self._has_failure)
        self._look.join(ANSWER_SECONDS)
        if self._look.is_alive():
            return
        look, self._look = self._look, None
        if look.error is not None:
            raise look.error
        if look.answer:
            raise RuntimeError("another rank has failed")

    def _has_failure(self) -> bool:
        self._store.add(_signs_key(self._rank), 1)
        return bool(self._store.check([FAILURE_KEY]))

    def _report(self, own: str) -> str:
        self._store.set(_ended_key(self._rank), "")
        silent = [] if self._store.check([FAILURE_KEY]) else self._silent_ranks()
        if silent:
            own += f" (no sign of life from rank {', '.join(map(str, silent))})"
        first: bytes = self._store.compare_set(FAILURE_KEY, "", own)
        reports = self._store.add(REPORTS_KEY, 1)
        deadline = time.monotonic() + REPORT_SECONDS
        while self._rank == 0 and reports < self._world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            reports = self._store.add(REPORTS_KEY, 0)
        return first.decode()

    def _silent_ranks(self) -> list[int]:
        """The ranks that are neither waiting for others nor have ended with an error: dead, stopped, or hanging."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        before = {rank: self._store.add(_signs_key(rank), 0) for rank in others}
        time.sleep(SIGN_SECONDS)
        return [rank for rank in others if self._store.add(_signs_key(rank), 0) == before[rank] and not self._has_ended(rank)]

    def _has_ended(self, rank: int) -> bool:
        return bool(self._store.check([_ended_key(rank)]))


def _signs_key(rank: int) -> str:
    return f"signs_of_life_of_rank_{rank}"


def _ended_key(rank: int) -> str:
    return f"rank_{rank}_has_ended"


class _Question(Thread, Generic[Answer]):
    """Runs a call in its own thread at once; `answer` or `error` is set when the thread has ended."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.answer: Answer | None = None
        self.error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._call()
        except RuntimeError as error:  # the rank that hosted the store has ended
            self.error = error
