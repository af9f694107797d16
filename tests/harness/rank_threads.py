"""Ranks as threads on one core: one computes at a time, and handing the interpreter over to another core takes longer than that."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")
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


def on_ranks(world_size: int, act: Callable[[int], Result]) -> list[Result]:
    """What `act` returns on each rank, a thread each. The first error of a rank is raised."""
    with on_one_core(), ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(act, range(world_size)))
