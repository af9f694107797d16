"""What would be left of files if the power failed: what a program brings to the disk, and what it gives names to, in its order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def disk_events(patch: pytest.MonkeyPatch) -> list[str]:
    """The calls from now on, as they come: "sync NAME" for a file or folder, and "rename NAME" with the new name.

    A rename is "early" if the file, or anything in the folder, has changed since it was brought to the disk, or never was.
    """
    events, on_disk = list[str](), dict[int, object]()

    def noted_sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        on_disk[path.stat().st_ino] = _content(path)
        events.append(f"sync {path.name}")

    def noted(rename: Callable[[Path, Path], None]) -> Callable[[str | Path, str | Path], None]:
        def noted_rename(source: str | Path, target: str | Path) -> None:
            path = Path(source)
            is_early = any(on_disk.get(found.stat().st_ino) != _content(found) for found in (path, *path.rglob("*")))
            events.append(f"{'early ' if is_early else ''}rename {Path(target).name}")
            rename(path, Path(target))

        return noted_rename

    patch.setattr(os, "fsync", noted_sync)
    for name in ("rename", "replace"):
        patch.setattr(os, name, noted(getattr(os, name)))
    return events


def _content(path: Path) -> object:
    """The bytes of a file, or the names in a folder."""
    return set(os.listdir(path)) if path.is_dir() else path.read_bytes()
