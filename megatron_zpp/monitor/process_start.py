"""The start time of this process. The entry imports this before torch: importing torch can take minutes on a shared file system."""

from __future__ import annotations

import time

MONOTONIC_SECONDS = time.monotonic()
