"""The tensor link of a rank that stands for all ranks of its group, in one thread, so that bytes and operations can be counted exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_zpp.comm.backend import Work
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.comm.waits import Waits
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Lane


class LoneBackend:
    """A backend whose other ranks send what this one sends."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.rank = 0

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        output.view(self.grid.tensor_ranks, -1).copy_(own.expand(self.grid.tensor_ranks, -1))
        return None

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        output.copy_(sent)
        return None

    def gather_world(self, own: Tensor) -> Tensor:
        return own.expand(self.grid.world_size, -1)


def lone_link(ranks: int) -> TensorLink:
    """The link of one of `ranks` tensor ranks."""
    grid = Grid.of_nodes(1, ranks, ranks)
    return TensorLink(LoneBackend(grid), Ledger(grid, 0), Staging(torch.device("cpu"), None), None, Waits())
