"""The ranks of all islands as one world."""

from __future__ import annotations

from torch import Tensor

from megatron_zpp.comm.backend import WorldGather


class AllIslands:
    """Gathers a few numbers between the islands, then inside every island: so each crosses to another island once.

    rank: of this process among all, island after island.
    """

    def __init__(self, island: WorldGather, column: WorldGather, island_ranks: int) -> None:
        """island: among the ranks of this island. column: among those that have this rank's place on each island."""
        self.rank = column.rank * island_ranks + island.rank
        self._island = island
        self._column = column

    def gather_world(self, own: Tensor) -> Tensor:
        """[data ranks, tensor ranks, numel]: `own` [numel] of every rank. Every rank must call it, and waits."""
        of_column = self._column.gather_world(own)
        islands = len(of_column)
        of_all = self._island.gather_world(of_column.flatten())  # [data ranks and tensor ranks of an island, islands x numel]
        data_ranks, tensor_ranks, _ = of_all.shape
        rows = of_all.view(data_ranks, tensor_ranks, islands, own.numel())
        return rows.permute(2, 0, 1, 3).reshape(islands * data_ranks, tensor_ranks, own.numel())
