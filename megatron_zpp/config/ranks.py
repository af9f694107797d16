"""The numbers of ranks of a run: every rule and every derived value takes the one that it means."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_zpp.config.counted import counted
from megatron_zpp.config.flag import FlagError, any_of, divisors
from megatron_zpp.config.schema import Config, DistributedConfig
from megatron_zpp.config.wrong_size import Proposal, WrongSize


@dataclass(frozen=True)
class RankCounts:
    """world: ranks in all, one per process. tensor: ranks that share layers and have the same samples. ranks_per_node: of the world.

    context: data ranks that divide the tokens of every sample among themselves. islands: groups of nodes that train by themselves.
    """

    world: int
    tensor: int
    ranks_per_node: int
    context: int = 1
    islands: int = 1

    @property
    def of_island(self) -> RankCounts:
        """Those of one island, which is a whole world to its engine."""
        return replace(self, world=self.world // self.islands, islands=1)

    @property
    def data(self) -> int:
        """Ranks of one ladder. They have different samples, or different tokens of a sample."""
        return self.world // self.tensor

    @property
    def data_ranks_per_node(self) -> int:
        """Ranks of one node that are in one ladder."""
        return self.ranks_per_node // self.tensor

    @property
    def sample_groups(self) -> int:
        """Groups of data ranks with samples of their own."""
        return self.data // self.context

    @property
    def groups_in_words(self) -> str:
        """What has samples of its own: see `sample_groups_in_words`."""
        return sample_groups_in_words(self.sample_groups, self.tensor, self.context)

    def dividing_samples(self, context_ranks: int) -> RankCounts:
        """The same ranks with samples that `context_ranks` data ranks divide. Raises FlagError if such groups do not fit the world."""
        if context_ranks in context_choices(self.of_island.data, self.data_ranks_per_node):
            return replace(self, context=context_ranks)
        raise WrongSize(_other_context_groups(context_ranks, self))


def sample_groups_in_words(groups: int, tensor_ranks: int, context_ranks: int) -> str:
    """`8 ranks`; `4 data-parallel ranks` if others have the same samples; `4 sample groups of 2 ranks` if ranks divide samples."""
    kind = "rank" if tensor_ranks == 1 else "data-parallel rank"
    if context_ranks == 1:
        return counted(groups, kind)
    return f"{counted(groups, 'sample group')} of {counted(context_ranks, kind)}"


def groups_of(distributed: DistributedConfig, groups: int) -> str:
    """`groups` groups with samples of their own, in words."""
    return sample_groups_in_words(groups, distributed.tensor_model_parallel_size, distributed.context_parallel_size)


def context_choices(data_ranks: int, of_node: int) -> list[int]:
    """The numbers of ranks that may divide samples, of `data_ranks` in all and `of_node` on a node: parts of a node, or whole nodes.

    So as many bytes enter every rank of a node from others.
    """
    return [ranks for ranks in divisors(data_ranks) if of_node % ranks == 0 or ranks % of_node == 0]


def count_ranks(config: Config, world_size: int, local_world_size: int | None) -> RankCounts:
    """The numbers of ranks in a world of `world_size`, of which the launcher started `local_world_size` on this node, if it says so.

    Raises FlagError if neither the flags nor the launcher say how many ranks a node has, and if nodes or groups do not divide them.
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
        raise WrongSize(_other_tensor_groups(ranks, "" if is_given else ", from the launcher"))
    ranks = replace(ranks, islands=_count_islands(config, ranks))
    return ranks.dividing_samples(config.distributed.context_parallel_size)


def _count_islands(config: Config, ranks: RankCounts) -> int:
    if not config.diloco.has_islands:
        return 1
    nodes = ranks.world // ranks.ranks_per_node
    islands = config.diloco.diloco_islands or nodes
    if nodes % islands != 0:
        raise FlagError(
            f"--diloco-islands {islands} does not divide the {counted(nodes, 'node')} (--ranks-per-node {ranks.ranks_per_node} of "
            f"{ranks.world}), and an island has whole nodes; choose {any_of(divisors(nodes))}."
        )
    return islands


def _other_tensor_groups(ranks: RankCounts, source: str) -> Proposal:
    asked, per_node = f"--tensor-model-parallel-size {ranks.tensor}", ranks.ranks_per_node
    start, more = f"start a multiple of {ranks.tensor} ranks per node", math.lcm(per_node, ranks.tensor) // per_node
    if ranks.world == 1:
        broken = f"{asked} needs as many ranks on a node, and this run has one rank"
        start += f", for example with torchrun --nproc_per_node {ranks.tensor}"
    else:
        broken = (
            f"{asked} does not divide the {counted(per_node, 'rank')} of a node (--ranks-per-node {per_node}{source}), and the ranks that "
            "share a layer stand on one node"
        )
    return Proposal(broken, "tensor_model_parallel_size", ranks.tensor, divisors(per_node), start=start, more=more)


def _other_context_groups(context_ranks: int, ranks: RankCounts) -> Proposal:
    asked = f"--context-parallel-size {context_ranks}"
    per_node, of_island = ranks.data_ranks_per_node, ranks.of_island.data
    islands = f"--diloco-islands {ranks.islands}, " if ranks.islands > 1 else ""
    beside = f"{islands}--tensor-model-parallel-size {ranks.tensor} of {ranks.world} ranks" if ranks.tensor > 1 else islands.rstrip(", ")
    beside = f" ({beside})" if beside else ""
    if of_island % context_ranks != 0:
        where = "the world" if ranks.islands == 1 else "an island"
        broken = f"{asked} does not divide the {sample_groups_in_words(of_island, ranks.tensor, 1)} of {where}{beside}"
    else:
        data_ranks = sample_groups_in_words(per_node, ranks.tensor, 1)
        broken = f"{asked} does not fit the {data_ranks} of a node{beside}, as a node must have whole groups, or a group whole nodes"
    return Proposal(broken, "context_parallel_size", context_ranks, context_choices(of_island, per_node))
