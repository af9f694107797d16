"""Locks on open files, which go with their holder however it ends."""

from __future__ import annotations

import errno
import fcntl
from typing import Protocol

NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class OpenFile(Protocol):
    def fileno(self) -> int: ...


def try_lock(file: OpenFile) -> bool:
    """False where another open file holds the lock now; True also on file systems without locks, where waiting would not help."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise
    return True
