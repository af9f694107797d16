"""Process groups of the lanes: one per (link, direction), made in the same order on every rank."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron_zpp.parallel.topology import LANES, Lane, Topology


def make_lane_groups(topology: Topology, rank: int, timeout: timedelta) -> dict[Lane, dist.ProcessGroup]:
    """The process group of `rank` on every lane whose link joins more than one rank; every rank of the world must call it.

    timeout: given to each group, since a new group does not take over the world's.
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
