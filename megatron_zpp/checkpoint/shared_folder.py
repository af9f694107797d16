"""What one rank's machine sees of another's files, and when."""

from __future__ import annotations

import time
from pathlib import Path

VISIBLE_WITHIN_SECONDS = 60.0  # network file systems show another machine's files late
LOOK_EVERY_SECONDS = 0.02
SHARED_FOLDER = "--save must be a folder of one file system that all ranks share"


def is_seen(path: Path) -> bool:
    """Whether the file is there, or comes into sight in time; somebody has made it already."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_SECONDS)
    return True
