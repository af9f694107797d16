"""Locks on open files. The operating system releases them when the process that holds them ends, even if it is killed."""

from __future__ import annotations

import errno
import fcntl
from typing import Protocol

NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class OpenFile(Protocol):
    def fileno(self) -> int: ...


def try_lock(file: OpenFile) -> bool:
    """Takes the lock of the file. False if another open file holds it; True also without locks on the file system: waiting cannot help."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise
    return True
