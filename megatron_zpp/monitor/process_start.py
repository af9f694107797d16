"""When this process began: the entry imports this before torch, whose import alone can take minutes on a shared file system."""

from __future__ import annotations

import time

MONOTONIC_SECONDS = time.monotonic()
