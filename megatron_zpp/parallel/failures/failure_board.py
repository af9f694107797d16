"""What ranks tell each other of a failure, through the store; nobody waits for a store that has become silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

import torch.distributed as dist

FAILURE_KEY = "failure"
REPORTS_KEY = "failure_reports"
REPORT_SECONDS = 5.0  # that rank 0, which may hold the store, waits for the others to read the first failure
SIGN_SECONDS = 3.0  # longer than a waiting rank takes from one `check` to the next
ANSWER_SECONDS = 0.2  # that a look at the store may take before the caller goes on

Answer = TypeVar("Answer")


class FailureBoard:
    """The first failure of a run, as every rank can learn it. A rank that waits for others calls `check` now and then: its sign of life.

    A store's client blocks without end where the link to it is cut, so every question is asked by a thread that may be left behind.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._look: _Question[bool] | None = None

    def report(self, text: str) -> str:
        """The first failure that any rank has reported, `text` of this rank if there was none before, or if the store is silent.

        The first one names the ranks that show no sign of life: their messages are what the others may have waited for in vain.
        """
        own = f"rank {self._rank}: {text}"
        question = _Question(lambda: self._report(own))
        question.join(SIGN_SECONDS + REPORT_SECONDS + ANSWER_SECONDS)
        return own if question.is_alive() or question.error is not None else question.answer or own

    def check(self) -> None:
        """Nothing, while no rank is known to have failed. Raises RuntimeError once one has, or once the store is lost.

        Called now and then: an answer that takes long is found by a later call.
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
        """The ranks that neither wait for others now nor have ended with an error: dead, stopped, or busy without end."""
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
    """A call in a thread of its own, begun at once; `answer` or `error` is there when it has ended."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.answer: Answer | None = None
        self.error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._call()
        except RuntimeError as error:  # the store went away with the rank that held it
            self.error = error
