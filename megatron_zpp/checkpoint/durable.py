"""Writes and renames files so that they survive a crash, and waits until files of other machines become visible."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # errors of file systems that need no fsync of folders
VISIBLE_WITHIN_SECONDS = 60.0  # network file systems show another machine's files late
LOOK_EVERY_SECONDS = 0.02
SHARED_FOLDER = "--save must be a folder of one file system that all ranks share"


def write_durably(path: Path, text: str) -> None:
    """Writes a file of UTF-8 text. Its content is durable; its name is durable only after `sync_folder`. Every OSError names the file."""
    with _naming(path), path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def rename_durably(source: Path, target: Path) -> None:
    """Renames a file or folder within its folder, atomically and durably."""
    source.rename(target)
    sync_folder(target.parent)


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


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _with_name(error, path) from error


def _with_name(error: OSError, path: Path) -> OSError:
    """The error with the name of its file, which the system gives only where it opens one. Its class follows from its number."""
    return error if error.filename is not None else OSError(error.errno, error.strerror, str(path))


def is_seen(path: Path) -> bool:
    """Waits until a file that another machine has written is visible here. Returns False if it is not visible in time."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_SECONDS)
    return True
