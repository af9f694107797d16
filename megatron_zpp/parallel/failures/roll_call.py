"""Waiting for all ranks without a collective: work that takes minutes on one rank and an hour on another would run into its timeout."""

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
SILENT_SECONDS = 300.0  # a rank without heartbeat for so long is gone
LINE_SECONDS = 30.0


@dataclass(frozen=True)
class RollCall:
    """The ranks of a store, which all do `work` and then meet; every rank makes one, with a `work` of its own in the run.

    check_others: raises where another rank has failed.
    """

    store: dist.Store
    rank: int
    world_size: int
    work: str
    check_others: Callable[[], None]

    @contextmanager
    def after(self, announce: Callable[[str], None]) -> Iterator[None]:
        """Runs the block and returns when every rank has left its own, however long that takes; an error in the block ends the wait.

        announce: gets a line now and then, on rank 0, about who is waited for. Raises RuntimeError on rank 0 where a rank shows no life.
        """
        with beating(self._beat, HEARTBEAT_SECONDS):
            yield
        self.store.add(self._key("done", self.rank), 1)
        self.store.add(self._key("done"), 1)
        self._wait(announce)

    def _beat(self) -> None:
        # A store that is gone ends the run anyway.
        with contextlib.suppress(RuntimeError):
            self.store.add(self._key("alive", self.rank), 1)

    def _wait(self, announce: Callable[[str], None]) -> None:
        started = time.monotonic()
        next_line = started + LINE_SECONDS
        poll_seconds = FIRST_POLL_SECONDS
        last_beats: dict[int, tuple[int, float]] = {}
        while self.store.add(self._key("done"), 0) < self.world_size:
            time.sleep(poll_seconds)
            poll_seconds = min(2 * poll_seconds, LAST_POLL_SECONDS)
            self.check_others()
            if self.rank > 0 or time.monotonic() < next_line:
                continue  # one rank that looks for the others is enough
            next_line += LINE_SECONDS
            missing = [rank for rank in range(self.world_size) if self.store.add(self._key("done", rank), 0) == 0]
            self._check_alive(missing, last_beats)
            announce(f"waiting for {_in_words(missing)} of {self.world_size} ranks: {self.work} ({time.monotonic() - started:.0f} s)")

    def _check_alive(self, missing: list[int], last_beats: dict[int, tuple[int, float]]) -> None:
        """last_beats: of each rank how often it has beaten, and when that was first seen here."""
        now = time.monotonic()
        for rank in missing:
            beats = self.store.add(self._key("alive", rank), 0)
            known, since = last_beats.get(rank, (-1, now))
            if beats != known:
                last_beats[rank] = (beats, now)
            elif now - since > SILENT_SECONDS:
                raise RuntimeError(f"rank {rank} has shown no life for {SILENT_SECONDS:.0f} s while the others wait for it: {self.work}")

    def _key(self, kind: str, rank: int | None = None) -> str:
        return f"roll call/{self.work}/{kind}" + ("" if rank is None else f"/{rank}")


def _in_words(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
