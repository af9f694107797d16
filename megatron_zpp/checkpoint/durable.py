"""Files and names that are on the disk when a call returns, whatever happens to the machine then."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # from file systems that need none


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
