"""The ranks of all islands as one world."""

from __future__ import annotations

from torch import Tensor

from megatron_zpp.comm.backend import WorldGather


class AllIslands:
    """Gathers a few numbers inside every island, then between the islands.

    rank: of this process among all, island after island.
    """

    def __init__(self, island: WorldGather, column: WorldGather, island_ranks: int) -> None:
        """island: among the ranks of this island. column: among those that have this rank's place on each island."""
        self.rank = column.rank * island_ranks + island.rank
        self._island = island
        self._column = column

    def gather_world(self, own: Tensor) -> Tensor:
        """[data ranks, tensor ranks, numel]: `own` [numel] of every rank. Every rank must call it, and waits."""
        of_island = self._island.gather_world(own)
        of_all = self._column.gather_world(of_island.flatten())
        return of_all.view(len(of_all) * len(of_island), *of_island.shape[1:])
