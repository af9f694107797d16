"""Calls a function at intervals from a thread while long work is running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beating(beat: Callable[[], None], every_seconds: float) -> Iterator[None]:
    """Calls beat() every `every_seconds` until the block ends, and then waits for the last call. `beat` must not raise."""
    done = threading.Event()

    def beat_until_done() -> None:
        while not done.wait(every_seconds):
            beat()

    thread = threading.Thread(target=beat_until_done, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
