"""The start time and the parent of this process. The entry imports this before torch: importing torch can take minutes."""

from __future__ import annotations

import os
import time

MONOTONIC_SECONDS = time.monotonic()
_PROCESS, _PARENT = os.getpid(), os.getppid()


def parent_at_start() -> int:
    """Process id of the parent when this module was imported; of the present one in a process that was forked after that."""
    return _PARENT if os.getpid() == _PROCESS else os.getppid()
