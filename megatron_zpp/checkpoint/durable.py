"""Files and names that are on the disk when a call returns, and files of other machines in a shared folder."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # from file systems that need none
VISIBLE_WITHIN_SECONDS = 60.0  # network file systems show another machine's files late
LOOK_EVERY_SECONDS = 0.02
SHARED_FOLDER = "--save must be a folder of one file system that all ranks share"


def write_durably(path: Path, text: str) -> None:
    """Writes a file of UTF-8 text; its name is durable after `sync_folder`."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def rename_durably(source: Path, target: Path) -> None:
    """Gives a file or folder another name in its folder, in one step."""
    source.rename(target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def is_seen(path: Path) -> bool:
    """Whether the file is there, or comes into sight in time; somebody has made it already."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_SECONDS)
    return True
