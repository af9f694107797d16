"""The numbers of ranks of a run: every rule and every derived value takes the one that it means."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import FlagError, any_of, divisors
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

    @property
    def data_in_words(self) -> str:
        """`8 ranks`, or `4 data-parallel ranks` if others share their samples."""
        return data_ranks_in_words(self.data, self.tensor)


def data_ranks_in_words(data_ranks: int, tensor_ranks: int) -> str:
    """`8 ranks`, or `4 data-parallel ranks` if others share their samples."""
    kind = "rank" if tensor_ranks == 1 else "data-parallel rank"
    return f"{data_ranks} {kind}" + ("s" if data_ranks != 1 else "")


def count_ranks(config: Config, world_size: int, local_world_size: int | None) -> RankCounts:
    """The numbers of ranks in a world of `world_size`, of which the launcher started `local_world_size` on this node, if it says so.

    Raises FlagError if neither the flags nor the launcher say how many ranks a node has, and if nodes or tensor groups do not divide them.
    """
    ranks_per_node = config.distributed.ranks_per_node
    if ranks_per_node is None:
        ranks_per_node = local_world_size
    if ranks_per_node is None and world_size > 1:
        raise FlagError(
            f"--ranks-per-node is not given and the launcher of these {world_size} ranks does not say it in LOCAL_WORLD_SIZE, "
            "LOCAL_SIZE or SLURM_NTASKS_PER_NODE; give --ranks-per-node."
        )
    ranks = RankCounts(world_size, config.distributed.tensor_model_parallel_size, ranks_per_node or 1)
    is_given = "ranks_per_node" in config.given
    if world_size % ranks.ranks_per_node != 0:
        source = "" if is_given else " (from the launcher)"
        raise FlagError(
            f"--ranks-per-node {ranks.ranks_per_node}{source} does not divide the {world_size} ranks of the world; "
            f"choose {any_of(divisors(world_size))}."
        )
    if ranks.ranks_per_node % ranks.tensor != 0:
        raise FlagError(_about_tensor_groups(ranks, "" if is_given else ", from the launcher"))
    return ranks


def _about_tensor_groups(ranks: RankCounts, source: str) -> str:
    if ranks.world == 1:
        return (
            f"--tensor-model-parallel-size {ranks.tensor} needs as many ranks on a node, and this run has one rank; "
            f"start a multiple of {ranks.tensor} ranks per node, for example with torchrun --nproc_per_node {ranks.tensor}."
        )
    one_or_more = "1 rank" if ranks.ranks_per_node == 1 else f"{ranks.ranks_per_node} ranks"
    return (
        f"--tensor-model-parallel-size {ranks.tensor} does not divide the {one_or_more} of a node (--ranks-per-node "
        f"{ranks.ranks_per_node}{source}), and the ranks that share a layer stand on one node; "
        f"choose {any_of(divisors(ranks.ranks_per_node))}, or start a multiple of {ranks.tensor} ranks per node."
    )
