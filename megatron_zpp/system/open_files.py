"""The limit of the files and sockets that this process may have open at a time."""

from __future__ import annotations

import contextlib
import resource

from megatron_zpp.system.user_error import UserError

BASE_FILES, FILES_PER_WORKER, FILES_OF_GROUPS = 16, 8, 48  # 4 ranks had at most 49 without workers; each worker added up to 9


GROUPS_OF_LINK = 3  # of the ranks of a node, and of those with the same place on every node: two lanes, and one for numbers


def allow_open_files(world_size: int, ranks_per_node: int, num_workers: int) -> None:
    """Raises the limit as far as the system lets this process: all ranks connect to rank 0, on CPUs each to every other, and in each
    group of a link all members to each other.

    Raises UserError if the limit may be too low for a run of this size: torch then ends without a word about it, or waits forever.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a system may have a lower limit than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE_FILES + FILES_PER_WORKER * num_workers
    if world_size > 1:
        needed += FILES_OF_GROUPS + world_size + GROUPS_OF_LINK * (ranks_per_node + world_size // ranks_per_node)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        fewer = f", or give less than --num-workers {num_workers}" if num_workers else ""
        raise UserError(
            f"this process may have only {allowed} files open, and a run of this size may need {needed}; allow more where the ranks start "
            f"(ulimit -n){fewer}"
        )
