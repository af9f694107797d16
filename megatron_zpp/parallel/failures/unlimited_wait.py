"""Ends a wait in a call of torch that takes no notice of failed ranks, and has no limit or a far longer one than it was given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

LOOK_SECONDS = 0.5


@contextmanager
def ended_by_failures(check_others: Callable[[], None], limit_seconds: float, end: Callable[[str], None]) -> Iterator[None]:
    """Runs the block, which waits for other ranks, and beside it a thread that looks for failures.

    check_others: raises RuntimeError if another rank has failed. end: is called from the thread with the reason, if a rank fails during
    the block or the block takes longer than the limit; it ends the process.
    """
    is_over = Event()

    def look() -> None:
        deadline = time.monotonic() + limit_seconds
        while not is_over.wait(LOOK_SECONDS):
            try:
                check_others()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not done after {limit_seconds:.0f} s")
            except RuntimeError as error:
                end(str(error))
                return

    thread = Thread(target=look, name="failures of others", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
