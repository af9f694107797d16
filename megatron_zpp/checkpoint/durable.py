"""Writes and renames files so that they survive a crash, and waits until files of other machines become visible."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron_zpp.system.output_file import create_new, naming_file, sync_folder

VISIBLE_WITHIN_SECONDS = 60.0  # how long a client of NFS may answer from what it knows of a folder (nfs(5): acdirmax)
LOOK_EVERY_SECONDS = 0.02
SHARED_FOLDER = "checkpoints (--save) need a folder of one file system that all ranks share"


def write_durably(path: Path, text: str) -> None:
    """Writes a new file of UTF-8 text. Its name is durable only after `sync_folder`. Every OSError names the file.

    Raises FileExistsError if the name is taken.
    """
    with naming_file(path), open(create_new(path), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def rename_durably(source: Path, target: Path) -> None:
    """Renames a file or folder within its folder, atomically and durably."""
    source.rename(target)
    sync_folder(target.parent)


def becomes_visible(path: Path) -> bool:
    """Waits for a file that another machine has written. Returns whether it can be seen here within VISIBLE_WITHIN_SECONDS."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_SECONDS)
    return True
