"""Waits for all ranks without a collective, for work that takes much longer on some ranks and would run into a collective's timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from megatron_zpp.parallel.failures.pulse import pulse_key
from megatron_zpp.parallel.failures.question import answer_within, counts_of, pauses
from megatron_zpp.parallel.ranks_in_words import ranks_in_words

SILENT_SECONDS = 300.0  # after this time without a pulse a rank counts as dead, or after the run's timeout if that is less
CHECK_SECONDS = 2.0
LINE_SECONDS = 30.0


@dataclass(frozen=True)
class RollCall:
    """All ranks do `work` and then wait for each other. Every rank makes one; `work` must be different from that of any other roll call.

    Each rank has a Pulse in the store. check_others: raises if another rank has failed.
    silent_seconds: after which a rank without a pulse counts as dead, and a store that does not answer as lost.
    """

    store: dist.Store
    rank: int
    world_size: int
    work: str
    check_others: Callable[[], None]
    silent_seconds: float = SILENT_SECONDS

    @contextmanager
    def after(self, announce: Callable[[str], None]) -> Iterator[None]:
        """Runs the block, then waits without a time limit until every rank has left its block. An error in the block is raised at once.

        announce: called now and then on rank 0 with a line that names the missing ranks.
        Rank 0 watches the missing ranks, and the others watch rank 0. Raises RuntimeError, naming the rank, if one that is missing has had
        no pulse for silent_seconds, or if the store is lost.
        """
        yield
        self._add("done", self.rank, count=1)
        self._add("done", count=1)
        self._wait(announce)

    def _wait(self, announce: Callable[[str], None]) -> None:
        started = time.monotonic()
        next_line, next_check = started + LINE_SECONDS, started
        pulses: dict[int, tuple[int, float]] = {}
        watched = list(range(1, self.world_size)) if self.rank == 0 else [0]  # one rank that watches all others is enough
        for pause in pauses():
            if self._add("done") >= self.world_size:
                return
            time.sleep(pause)
            self.check_others()
            if time.monotonic() < min(next_check, next_line):
                continue
            next_check = time.monotonic() + CHECK_SECONDS
            done = self._asked_counts([self._key("done", rank) for rank in watched])
            watched = [rank for rank, count in zip(watched, done, strict=True) if count == 0]
            self._check_alive(watched, pulses)
            if self.rank > 0 or time.monotonic() < next_line:
                continue
            next_line += LINE_SECONDS
            announce(f"waiting for {ranks_in_words(watched)} of {self.world_size}: {self.work} ({time.monotonic() - started:.0f} s)")

    def _check_alive(self, missing: list[int], pulses: dict[int, tuple[int, float]]) -> None:
        """Raises RuntimeError if a missing rank is silent. pulses: of each rank, its pulse and when that was first seen."""
        now = time.monotonic()
        for rank, pulse in zip(missing, self._asked_counts([pulse_key(rank) for rank in missing]), strict=True):
            known, since = pulses.get(rank, (-1, now))
            if pulse != known:
                pulses[rank] = (pulse, now)
            elif now - since > self.silent_seconds:
                raise RuntimeError(
                    f"rank {rank} has shown no life for {self.silent_seconds:.0f} s while the others wait for it: {self.work}"
                )

    def _add(self, kind: str, rank: int | None = None, count: int = 0) -> int:
        return answer_within(self.silent_seconds, lambda: self.store.add(self._key(kind, rank), count))

    def _asked_counts(self, keys: Sequence[str]) -> list[int]:
        return answer_within(self.silent_seconds, lambda: counts_of(self.store, keys))

    def _key(self, kind: str, rank: int | None) -> str:
        return f"roll call/{self.work}/{kind}" + ("" if rank is None else f"/{rank}")
