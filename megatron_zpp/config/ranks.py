"""The numbers of ranks of a run: every rule and every derived value takes the one that it means."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.schema import Config


@dataclass(frozen=True)
class RankCounts:
    """world: ranks in all, one per process. tensor: ranks that share layers and samples. ranks_per_node: of the world."""

    world: int
    tensor: int
    ranks_per_node: int

    @property
    def data(self) -> int:
        """Ranks with samples of their own: those of one ladder."""
        return self.world // self.tensor

    @property
    def data_ranks_per_node(self) -> int:
        """Ranks of one node that are in one ladder."""
        return self.ranks_per_node // self.tensor


def count_ranks(config: Config, world_size: int, local_world_size: int | None) -> RankCounts:
    """The numbers of ranks in a world of `world_size`, of which the launcher started `local_world_size` on this node, if it says so.

    Raises FlagError if neither the flags nor the launcher say how many ranks a node has.
    """
    ranks_per_node = config.distributed.ranks_per_node
    if ranks_per_node is None:
        ranks_per_node = local_world_size
    if ranks_per_node is None and world_size > 1:
        raise FlagError(
            f"--ranks-per-node is not given and the launcher of these {world_size} ranks does not say it in LOCAL_WORLD_SIZE, "
            "LOCAL_SIZE or SLURM_NTASKS_PER_NODE; give --ranks-per-node."
        )
    return RankCounts(world_size, tensor=1, ranks_per_node=ranks_per_node or 1)
