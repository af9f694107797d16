"""Files of tests need not outlive the loss of power that fsync, which takes milliseconds, is for."""

from __future__ import annotations

import errno
import os
import stat


def forget_fsync() -> None:
    """Lets fsync bring nothing to the disk in this process and in those that it forks."""
    os.fsync = _refuse_what_fsync_refuses  # type: ignore[assignment]


def _refuse_what_fsync_refuses(descriptor: int) -> None:
    """Raises OSError for what is closed, and for what is neither a file nor a folder."""
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
