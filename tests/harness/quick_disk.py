"""Files of tests need not outlive the loss of power that fsync, which takes milliseconds, is for."""

from __future__ import annotations

import os


def forget_fsync() -> None:
    """Lets fsync do nothing in this process and in those that it forks."""
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
