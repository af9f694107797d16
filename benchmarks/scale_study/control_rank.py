"""A rank that gathers numbers again and again, and says how many bytes came into its node: in levels, and around one ring of all ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_zpp.comm.backend import TorchBackend
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import make_world_groups
from testbed.network import interface_bytes

TIMEOUT, CPU = timedelta(minutes=5), torch.device("cpu")


def main(ranks_per_node: int, numbers: int, calls: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    grid = Grid.of_nodes(world_size // ranks_per_node, ranks_per_node)
    backend = TorchBackend(grid, rank, {}, make_world_groups(grid, [range(world_size)], rank, TIMEOUT, CPU))
    own = torch.full((numbers,), float(rank), dtype=torch.float64)
    output = torch.empty(world_size * numbers, dtype=torch.float64)
    levels = _bytes_of(lambda: backend.gather_world(own), calls)
    ring = _bytes_of(lambda: dist.all_gather_into_tensor(output, own), calls)
    if rank == 0:
        print(json.dumps([levels, ring]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _bytes_of(gather: Callable[[], object], calls: int) -> float:
    """Bytes that come into this node for one call, headers included. Before and after them the links are quiet."""
    gather()
    _quiet()
    before = interface_bytes(os.getpid())
    dist.barrier()
    for _ in range(calls):
        gather()
    _quiet()
    with_barrier = interface_bytes(os.getpid()) - before
    before = interface_bytes(os.getpid())
    dist.barrier()
    _quiet()
    return (with_barrier - (interface_bytes(os.getpid()) - before)) / calls


def _quiet() -> None:
    dist.barrier()
    time.sleep(0.3)  # for acknowledgements that are under way


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
