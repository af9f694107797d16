"""The limit of the files and sockets that this process may have open at a time."""

from __future__ import annotations

import contextlib
import resource

BASE_FILES, FILES_PER_WORKER = 64, 8  # 4 ranks had at most 49 without workers; each worker added up to 9


def allow_open_files(world_size: int, num_workers: int) -> None:
    """Raises the limit as far as the system lets this process, because gloo connects every rank to every other. NCCL does the same.

    Raises ValueError if the limit is too low for any run of this size: torch then ends without a word about it, or waits forever.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a system may have a lower limit than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE_FILES + FILES_PER_WORKER * num_workers + world_size
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise ValueError(
            f"this process may have only {allowed} files open, and this run needs at least {needed}; allow more where the ranks start "
            "(ulimit -n), or give a lower --num-workers"
        )
