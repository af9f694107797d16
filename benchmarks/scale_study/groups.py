"""Process groups of a rank among thousands, with torch's fake groups: how many all ranks make, and how long a rank is at it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import make_lane_groups, make_world_groups

NODES = (8, 64, 512)
RANKS_PER_NODE = 8
TIMEOUT, CPU = timedelta(minutes=1), torch.device("cpu")


@dataclass(frozen=True)
class Groups:
    """made: by all ranks together; each calls torch for every one. own: those that a rank is in. seconds: of one rank's calls."""

    ranks: int
    made: int
    own: int
    seconds: float


def measure() -> list[Groups]:
    return [measured(nodes) for nodes in NODES]


def measured(nodes: int) -> Groups:
    grid = Grid.of_nodes(nodes, RANKS_PER_NODE)
    ranks = range(grid.world_size)
    dist.init_process_group("fake", rank=0, world_size=grid.world_size, store=FakeStore())
    try:
        with patch.object(dist, "new_group", wraps=dist.new_group) as calls:
            begun = time.process_time()
            lanes = make_lane_groups(grid, 0, TIMEOUT, CPU)
            world = make_world_groups(grid, [ranks], 0, TIMEOUT, CPU)
            seconds = time.process_time() - begun
        return Groups(grid.world_size, calls.call_count, len(lanes) + len(world.made()), seconds)
    finally:
        dist.destroy_process_group()
