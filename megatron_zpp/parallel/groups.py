"""Makes the process groups of the lanes: one per link and direction, in the same order on every rank."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron_zpp.parallel.topology import LANES, Lane, Topology


def make_lane_groups(topology: Topology, rank: int, timeout: timedelta) -> dict[Lane, dist.ProcessGroup]:
    """The process group of `rank` for each lane whose link has more than one rank; every rank of the world must call it.

    timeout: passed to each group, because a new group does not inherit that of the world.
    """
    own: dict[Lane, dist.ProcessGroup] = {}
    for lane in LANES:
        if topology.link_ranks(lane.link) == 1:
            continue
        for ranks in topology.groups(lane.link):
            group = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                own[lane] = group
    return own
