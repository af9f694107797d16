"""Threads of which one computes at a time stay on one core: handing the interpreter over to another takes longer than what they compute."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_libc = ctypes.CDLL(None)


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keeps this thread, and those that start meanwhile, on the core where it is: the kernel has chosen it as the least busy one."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_libc.sched_getcpu()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
