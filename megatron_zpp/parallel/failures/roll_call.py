"""Waits for all ranks without a collective, for work that takes much longer on some ranks and would run into a collective's timeout."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from megatron_zpp.monitor.heartbeat import beating

FIRST_POLL_SECONDS = 0.02
LAST_POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
SILENT_SECONDS = 300.0  # after this time without a heartbeat a rank counts as dead, or after the run's timeout if that is less
CHECK_SECONDS = 5.0
LINE_SECONDS = 30.0


@dataclass(frozen=True)
class RollCall:
    """All ranks do `work` and then wait for each other. Every rank makes one; `work` must be different from that of any other roll call.

    check_others: raises if another rank has failed. silent_seconds: after which a rank without a heartbeat counts as dead.
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
        Rank 0 watches the missing ranks, and the others watch rank 0. Raises RuntimeError, naming the rank, if one that is missing has sent
        no heartbeat for silent_seconds.
        """
        with beating(self._beat, HEARTBEAT_SECONDS):
            yield
        self.store.add(self._key("done", self.rank), 1)
        self.store.add(self._key("done"), 1)
        self._wait(announce)

    def _beat(self) -> None:
        # If the store is lost, the run ends anyway.
        with contextlib.suppress(RuntimeError):
            self.store.add(self._key("alive", self.rank), 1)

    def _wait(self, announce: Callable[[str], None]) -> None:
        started = time.monotonic()
        next_line, next_check = started + LINE_SECONDS, started
        poll_seconds = FIRST_POLL_SECONDS
        last_beats: dict[int, tuple[int, float]] = {}
        while self.store.add(self._key("done"), 0) < self.world_size:
            time.sleep(poll_seconds)
            poll_seconds = min(2 * poll_seconds, LAST_POLL_SECONDS)
            self.check_others()
            if time.monotonic() < min(next_check, next_line):
                continue
            next_check = time.monotonic() + CHECK_SECONDS
            watched = range(1, self.world_size) if self.rank == 0 else range(1)  # one rank that watches all others is enough
            missing = [rank for rank in watched if self.store.add(self._key("done", rank), 0) == 0]
            self._check_alive(missing, last_beats)
            if self.rank > 0 or time.monotonic() < next_line:
                continue
            next_line += LINE_SECONDS
            announce(f"waiting for {_in_words(missing)} of {self.world_size} ranks: {self.work} ({time.monotonic() - started:.0f} s)")

    def _check_alive(self, missing: list[int], last_beats: dict[int, tuple[int, float]]) -> None:
        """Raises RuntimeError if a missing rank is silent. last_beats: of each rank, its number of beats and when that was first seen."""
        now = time.monotonic()
        for rank in missing:
            beats = self.store.add(self._key("alive", rank), 0)
            known, since = last_beats.get(rank, (-1, now))
            if beats != known:
                last_beats[rank] = (beats, now)
            elif now - since > self.silent_seconds:
                raise RuntimeError(
                    f"rank {rank} has shown no life for {self.silent_seconds:.0f} s while the others wait for it: {self.work}"
                )

    def _key(self, kind: str, rank: int | None = None) -> str:
        return f"roll call/{self.work}/{kind}" + ("" if rank is None else f"/{rank}")


def _in_words(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
