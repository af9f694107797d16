"""The limit of the files and sockets that this process may have open at a time."""

from __future__ import annotations

import contextlib
import resource

from megatron_zpp.system.user_error import UserError

BASE_FILES, FILES_PER_WORKER, FILES_OF_GROUPS = 16, 8, 48  # 4 ranks had at most 49 without workers; each worker added up to 9


def allow_open_files(world_size: int, num_workers: int) -> None:
    """Raises the limit as far as the system lets this process, because gloo connects every rank to every other, and all connect to
    rank 0. NCCL does the same.

    Raises UserError if the limit may be too low for a run of this size: torch then ends without a word about it, or waits forever.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a system may have a lower limit than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE_FILES + FILES_PER_WORKER * num_workers + (FILES_OF_GROUPS + world_size if world_size > 1 else 0)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        fewer = f", or give less than --num-workers {num_workers}" if num_workers else ""
        raise UserError(
            f"this process may have only {allowed} files open, and a run of this size may need {needed}; allow more where the ranks start "
            f"(ulimit -n){fewer}"
        )
