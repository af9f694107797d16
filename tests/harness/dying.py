"""Processes that are killed in the middle of what they do to the disk."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

# All calls by which a save changes the disk.
DISK_CALLS = ((os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "open"), (os, "link"))


def child(task: Callable[[], object]) -> int:
    """Forks a process that does the task and ends. Returns its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            task()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


def die_at(moment: int) -> None:
    """Kills this process before its `moment`-th call that changes the disk, which is after the one before it."""
    lock, calls = threading.Lock(), 0

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def count_and_call(*arguments: object, **options: object) -> object:
            nonlocal calls
            with lock:
                calls += 1
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

        return count_and_call

    for module, name in DISK_CALLS:
        setattr(module, name, counted(getattr(module, name)))
