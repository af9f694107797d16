"""Opens files for writing. A link or a pipe that somebody put into a shared folder is neither written through nor waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

STANDARD_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # errors of file systems that need no fsync of folders
_ALWAYS = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # without the last one, opening a pipe would wait for its reader


def new_file(path: Path) -> BinaryIO:
    """A new, empty file in the place of whatever had this name. A link of this name is removed and not followed."""
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _ALWAYS, 0o666), "wb")


def kept_file(path: str | Path, *, appends: bool = False) -> int:
    """A descriptor for reading and writing the file of this name, which is made if there is none, and is not emptied.

    Raises OSError, without waiting, for a link and for anything else that is no regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | _ALWAYS | (os.O_APPEND if appends else 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    return _checked(descriptor, path)


def named_output(path: Path) -> int:
    """A descriptor for reading and appending to a file that a flag names: a regular file or a link to one, or the null device.

    /dev/stdout and /dev/stderr are what this process writes to under these names, of any kind. Raises OSError, without waiting, for
    anything else.
    """
    if str(path) in STANDARD_STREAMS:
        return os.dup(STANDARD_STREAMS[str(path)])
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _ALWAYS, 0o666)
    if _is_null_device(os.fstat(descriptor)):
        return descriptor
    return _checked(descriptor, path)


def sync_folder(folder: Path) -> None:
    """Makes the file names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _checked(descriptor: int, path: str | Path) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def _is_null_device(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev
