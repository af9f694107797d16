"""Shows the other ranks that this process lives, and notices when the store does not answer any more."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread

import torch.distributed as dist

from megatron_zpp.parallel.failures.question import NoAnswer, answer_within

PULSE_SECONDS = 1.0
LAST_PULSE_SECONDS = 2.0  # for a request that is under way when the pulse ends


def pulse_key(rank: int) -> str:
    return f"pulse of rank {rank}"


class Pulse:
    """Counts up an entry of the store every second, from a thread, so that neither computing nor waiting for others interrupts it.

    silent_seconds: after which a store that does not answer is lost. when_silent: is called then.
    """

    def __init__(self, store: dist.Store, rank: int, silent_seconds: float, when_silent: Callable[[], None]) -> None:
        self._store = store
        self._rank = rank
        self._silent_seconds = silent_seconds
        self._when_silent = when_silent
        self._done = Event()
        self._thread = Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it; the others must not take this rank for dead any more."""
        self._done.set()
        self._thread.join(LAST_PULSE_SECONDS)

    def _run(self) -> None:
        while not self._done.is_set():
            started = time.monotonic()
            try:
                answer_within(self._silent_seconds, self._beat)
            except NoAnswer:
                if not self._done.is_set():
                    self._when_silent()
                return
            except RuntimeError:  # closed: the next request of anybody here finds that out too
                return
            self._done.wait(max(0.0, PULSE_SECONDS - (time.monotonic() - started)))

    def _beat(self) -> int:
        return self._store.add(pulse_key(self._rank), 1)
