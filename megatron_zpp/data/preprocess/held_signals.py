"""Lets Ctrl-C wait for the end of calls that must not be interrupted."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_interruptions() -> Iterator[None]:
    """Holds the first SIGINT or SIGTERM back until the end of the block. A second one is not held, in case the block does not end.

    A handler raises its exception wherever the main thread is. Inside of a `threading.Condition` that leaves the lock taken for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread
        return
    held: list[int] = []

    def hold(number: int, _: FrameType | None) -> None:
        held.append(number)
        if len(held) > 1:
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    found = {number: signal.getsignal(number) for number in INTERRUPTIONS}
    handlers = {number: handler for number, handler in found.items() if handler is not None}  # None: not of Python, so it stays
    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        restore()
        if len(held) == 1:
            signal.raise_signal(held[0])
