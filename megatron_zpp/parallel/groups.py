"""Makes the process groups of the lanes (one per link and direction, in the same order on every rank), and ends all groups."""

from __future__ import annotations

import gc
from datetime import timedelta

import torch.distributed as dist

from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import LANES, Lane


def make_lane_groups(grid: Grid, rank: int, timeout: timedelta) -> dict[Lane, dist.ProcessGroup]:
    """The process group of `rank` for each lane whose link has more than one rank; every rank of the world must call it.

    timeout: passed to each group, because a new group does not inherit that of the world.
    """
    own: dict[Lane, dist.ProcessGroup] = {}
    for lane in LANES:
        if grid.ladder.link_ranks(lane.link) == 1:
            continue
        for ranks in grid.groups(lane.link):
            group = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                own[lane] = group
    return own


def end_world() -> None:
    """Ends all process groups; no message may be under way. Every rank must call it.

    Objects that still hold a collective are freed now: gloo's threads must not free them while the interpreter shuts down.
    """
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
