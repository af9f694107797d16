"""Tells all ranks, through the store that they share, that one has failed. No rank hangs if the store stops answering."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from megatron_zpp.parallel.failures.pulse import pulse_key
from megatron_zpp.parallel.failures.question import NoAnswer, Question, answer_within, counts_of
from megatron_zpp.parallel.ranks_in_words import ranks_in_words

FAILURE_KEY = "failure"
REPORTERS_KEY, REPORTS_KEY = "failure_reporters", "failure_reports"
REPORT_SECONDS = 4.0  # how long rank 0, which may hold the store, waits for the others to read the first failure
SIGN_SECONDS = 3.0  # longer than the time between two calls of `check` by a waiting rank
LIFE_SECONDS = 6.0  # longer than the time between two pulses of a rank on a machine that is overloaded
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 0.2  # how long `check` waits for the store before it returns
MOST_CHARACTERS = 10_000


class Keeper(NamedTuple):
    """Who holds the store, such as `rank 0`, and where, such as `MASTER_ADDR=node7, MASTER_PORT=29500`."""

    name: str
    place: str


class FailureBoard:
    """Shares the first failure of a run among its ranks. Each rank has a Pulse, and calls `check` now and then while it waits for others.

    keeper: of the store; None if that is this process, or nobody.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, keeper: Keeper | None = None) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._keeper = keeper
        self._loss = ""
        self._known = ""
        self._look: Question[str] | None = None

    def enter(self) -> None:
        """Makes this rank's entries, so that one question later asks for those of all ranks."""
        for key in (_signs_key(self._rank), _ended_key(self._rank)):
            self._store.add(key, 0)

    def report(self, text: str, *, is_cause: bool = False) -> str:
        """Reports `text`; returns the first failure that any rank has reported, or if the store does not answer, that its holder is lost.

        The first failure names the ranks without a pulse: waiting for them may be why the others failed.
        is_cause: whether no other rank can be why this one fails. Then none is named.
        """
        own = f"rank {self._rank}: {text}"
        if not self._loss:
            try:
                return answer_within(LIFE_SECONDS + REPORT_SECONDS + 1.0, lambda: self._report(own, is_cause))
            except NoAnswer:
                self.lose("does not answer")
            except RuntimeError:
                self.lose("is closed")
        return self._known or self._without_store(own)

    def lose(self, how: str) -> None:
        """Takes note that the store is lost."""
        self._loss = self._loss or how

    def check(self) -> None:
        """Raises RuntimeError if another rank has reported a failure, or if the store is lost.

        Must be called repeatedly: if the store answers slowly, a later call finds the answer.
        """
        if self._look is None:
            self._look = Question(self._first_failure)
        self._look.join(ANSWER_SECONDS)
        if self._look.is_alive():
            return
        look, self._look = self._look, None
        if look.error is not None:
            raise look.error
        if look.answer:
            self._known = look.answer
            raise RuntimeError("another rank has failed")

    def _first_failure(self) -> str:
        """The first failure that has been reported, or ""."""
        self._store.add(_signs_key(self._rank), 1)
        return _text(self._store.get(FAILURE_KEY)) if self._store.check([FAILURE_KEY]) else ""

    def _report(self, own: str, is_cause: bool) -> str:
        self._store.add(_ended_key(self._rank), 1)
        is_first = self._store.add(REPORTERS_KEY, 1) == 1  # one rank that looks at all others is enough
        described = own if is_cause else self._with_silent_ranks(own) if is_first else self._after_the_first(own)
        first = self._store.compare_set(FAILURE_KEY, "", described)
        reports = self._store.add(REPORTS_KEY, 1)
        deadline = time.monotonic() + REPORT_SECONDS
        while self._rank == 0 and reports < self._world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            reports = self._store.add(REPORTS_KEY, 0)
        return _text(first)

    def _after_the_first(self, own: str) -> str:
        """Waits until the first that reports has done so, unless it dies meanwhile."""
        deadline = time.monotonic() + LIFE_SECONDS + LOOK_SECONDS
        while not self._store.check([FAILURE_KEY]) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 4)
        return own

    def _with_silent_ranks(self, own: str) -> str:
        """The failure, and what the ranks show that have not ended with an error: which have no pulse, or else which do not wait."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        pulses, signs = self._counts(pulse_key, others), self._counts(_signs_key, others)
        started = time.monotonic()
        lifeless = others
        while time.monotonic() - started < (LIFE_SECONDS if lifeless else SIGN_SECONDS):
            time.sleep(LOOK_SECONDS)
            lifeless = self._not_ended(self._unchanged(pulse_key, pulses, lifeless))
        if lifeless:
            return f"{ranks_in_words(lifeless)} {'shows' if len(lifeless) == 1 else 'show'} no sign of life (noticed by {own})"
        busy = self._not_ended(self._unchanged(_signs_key, signs, others))
        return f"{own} (busy or hanging: {ranks_in_words(busy)})" if 0 < len(busy) < len(others) else own

    def _unchanged(self, key: Callable[[int], str], before: Mapping[int, int], ranks: Sequence[int]) -> list[int]:
        """Those of the ranks whose entry is what it was before."""
        now = self._counts(key, ranks)
        return [rank for rank in ranks if now[rank] == before[rank]]

    def _not_ended(self, ranks: Sequence[int]) -> list[int]:
        ended = self._counts(_ended_key, ranks)
        return [rank for rank in ranks if not ended[rank]]

    def _counts(self, key: Callable[[int], str], ranks: Sequence[int]) -> dict[int, int]:
        return dict(zip(ranks, counts_of(self._store, [key(rank) for rank in ranks]), strict=True))

    def _without_store(self, own: str) -> str:
        if self._keeper is None:
            return own
        name, place = self._keeper
        return f"{name} shows no sign of life: the store that it holds at {place} {self._loss} (noticed by {own})"


def _text(content: bytes) -> str:
    return content[:MOST_CHARACTERS].decode(errors="replace")


def _signs_key(rank: int) -> str:
    return f"signs_of_life_of_rank_{rank}"


def _ended_key(rank: int) -> str:
    return f"rank_{rank}_has_ended"
