"""Opens files for writing. A link or a pipe that somebody put into a shared folder is neither written through nor waited for."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

STANDARD_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # errors of file systems that need no fsync of folders
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_ALWAYS = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # without the last one, opening a pipe would wait for its reader


def create_new(path: Path) -> int:
    """Creates a file that must not exist yet, not even as a link, and returns its descriptor for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _ALWAYS, 0o666)


def new_file(path: Path) -> BinaryIO:
    """A new, empty file in the place of whatever had this name. A link of this name is removed and not followed."""
    path.unlink(missing_ok=True)
    return open(create_new(path), "wb")


def kept_file(path: str | Path, *, appends: bool = False) -> int:
    """A descriptor for reading and writing the file of this name, which is made if there is none, and is not emptied.

    Raises OSError, without waiting, for a link and for anything else that is not a regular file.
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
    """A descriptor for reading and appending to a file that a flag names: a regular file or a link to one, /dev/null or /dev/full.

    /dev/stdout and /dev/stderr are what this process writes to under these names, of any kind. Raises OSError, without waiting, for
    anything else.
    """
    if str(path) in STANDARD_STREAMS:
        return os.dup(STANDARD_STREAMS[str(path)])
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _ALWAYS, 0o666)
    if _never_blocks(os.fstat(descriptor)):
        return descriptor
    return _checked(descriptor, path)


def sync_folder(folder: Path) -> None:
    """Makes the file names in a folder durable. Every OSError names the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise _with_name(error, folder) from error
    finally:
        os.close(descriptor)


def remedy_for(error: OSError) -> str:
    """What a user can do about a folder in which a file could not be written."""
    return "free space there, or choose another folder" if error.errno in _NO_SPACE else "choose a folder that every rank can write to"


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Gives every OSError of the block the name of the file."""
    try:
        yield
    except OSError as error:
        raise _with_name(error, path) from error


def _with_name(error: OSError, path: Path) -> OSError:
    """The error with the name of its file, which the system gives only where it opens one. Its class follows from its number."""
    return error if error.filename is not None else OSError(error.errno, error.strerror, str(path))


def _checked(descriptor: int, path: str | Path) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def _never_blocks(status: os.stat_result) -> bool:
    """Whether it is the null device, or the one that is always full."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev in (os.makedev(1, 3), os.makedev(1, 7))
