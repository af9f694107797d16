"""Arranges the ranks of a world as ladders of data ranks that stand beside each other (pure arithmetic, no torch).

W = D x T ranks are T ladders of D data ranks each. Rank r has data rank r // T, its place in its ladder, and tensor rank r % T, the number
of its ladder. The T ranks of equal data rank get the same data; the tensor link joins them, and they share a node. Drawn for 2 nodes of 4
ranks and T = 2, where each ladder has nodes of 2 ranks:

                            ladder t = 0    ladder t = 1
    node 0    data rank 0      rank 0          rank 1        <- tensor link: the ranks of one row
              data rank 1      rank 2          rank 3
    node 1    data rank 2      rank 4          rank 5
              data rank 3      rank 6          rank 7

With T = 1 there is one ladder, and every rank is its own data rank.

C consecutive data ranks are a sample group: they have the same samples, and each has other tokens of them. Data rank d has context rank
d % C in sample group d // C. The context link joins those of one ladder. With C = 2 it joins ranks 0 and 2 above, 1 and 3, 4 and 6, 5 and
7. Weights and gradients move between all D data ranks, whatever C is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from megatron_zpp.config.counted import counted
from megatron_zpp.config.flag import any_of, divisors
from megatron_zpp.config.ranks import context_choices
from megatron_zpp.parallel.topology import Link, Topology
from megatron_zpp.system.user_error import UserError


class Peers(NamedTuple):
    """How many other ranks a rank shares something with: those of its own node and those of others."""

    local: int
    remote: int


@dataclass(frozen=True)
class Grid:
    """The world of all ranks: `tensor_ranks` ladders beside each other.

    ranks_per_node: ranks of one node, of all ladders. partition_ranks: of a partition of one ladder (parallel/topology.py).
    context_ranks: data ranks of one sample group: a part of a node's data ranks, or those of whole nodes.
    Raises UserError if a number is not positive or does not divide.
    """

    world_size: int
    ranks_per_node: int
    partition_ranks: int
    tensor_ranks: int = 1
    context_ranks: int = 1

    def __post_init__(self) -> None:
        if min(self.world_size, self.ranks_per_node, self.partition_ranks, self.tensor_ranks, self.context_ranks) < 1:
            raise UserError(f"{self}: all sizes must be positive")
        if self.world_size % self.ranks_per_node:
            raise UserError(
                f"--ranks-per-node {self.ranks_per_node} does not divide the world size {self.world_size}; "
                f"choose {self._fitting('ranks_per_node', divisors(self.world_size))}"
            )
        if self.ranks_per_node % self.tensor_ranks:
            raise UserError(
                f"--tensor-model-parallel-size {self.tensor_ranks} does not divide the {counted(self.ranks_per_node, 'rank')} of a node "
                "(--ranks-per-node), and ranks that share a layer must share a node; "
                f"choose {self._fitting('tensor_ranks', divisors(self.ranks_per_node))}"
            )
        ranks_of_ladder = self.ranks_per_node // self.tensor_ranks
        if ranks_of_ladder % self.partition_ranks:
            beside = "" if self.tensor_ranks == 1 else f" that are in one ladder (--tensor-model-parallel-size {self.tensor_ranks})"
            raise UserError(
                f"--zero-hpz-partition-size {self.partition_ranks} does not divide the {counted(ranks_of_ladder, 'rank')} of a "
                f"node{beside}; choose {any_of(divisors(ranks_of_ladder))}"
            )
        choices = context_choices(self.data_ranks, ranks_of_ladder)
        if self.context_ranks not in choices:
            raise UserError(
                f"--context-parallel-size {self.context_ranks} does not divide the {counted(self.data_ranks, 'data-parallel rank')} "
                f"into groups that are whole nodes or equal parts of one, and a node has {ranks_of_ladder} of these ranks; "
                f"choose {any_of(choices)}"
            )

    def _fitting(self, field: str, sizes: list[int]) -> str:
        """Those of the sizes that break no other rule in place of this number, in words; all of them if every one does."""
        return any_of([size for size in sizes if self._could_have(field, size)] or sizes)

    def _could_have(self, field: str, size: int) -> bool:
        try:
            replace(self, **{field: size})
        except ValueError:
            return False
        return True

    @classmethod
    def of_nodes(cls, nodes: int, ranks_per_node: int, tensor_ranks: int = 1, context_ranks: int = 1) -> Grid:
        """A world of `nodes` nodes, each of which has one partition of every ladder."""
        return cls(nodes * ranks_per_node, ranks_per_node, max(1, ranks_per_node // tensor_ranks), tensor_ranks, context_ranks)

    @cached_property
    def ladder(self) -> Topology:
        """The data ranks of one ladder; all ladders are alike."""
        return Topology(self.data_ranks, self.ranks_per_node // self.tensor_ranks, self.partition_ranks)

    @property
    def data_ranks(self) -> int:
        """D, the number of data ranks: ranks of one ladder."""
        return self.world_size // self.tensor_ranks

    @property
    def sample_groups(self) -> int:
        """D / C, the number of groups of data ranks that have samples of their own."""
        return self.data_ranks // self.context_ranks

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.world_size // self.ranks_per_node

    def data_rank_of(self, rank: int) -> int:
        """The place of `rank` in its ladder, from 0 to D - 1."""
        return rank // self.tensor_ranks

    def tensor_rank_of(self, rank: int) -> int:
        """The ladder of `rank`, from 0 to T - 1."""
        return rank % self.tensor_ranks

    def context_rank_of(self, rank: int) -> int:
        """The place of `rank` among those that divide its samples, from 0 to C - 1: it has the tokens with this place in each sample."""
        return self.data_rank_of(rank) % self.context_ranks

    def sample_group_of(self, rank: int) -> int:
        """The group of ranks that divide samples, from 0 to D / C - 1."""
        return self.data_rank_of(rank) // self.context_ranks

    def rank_of(self, data_rank: int, tensor_rank: int) -> int:
        """The rank at one place of one ladder."""
        return data_rank * self.tensor_ranks + tensor_rank

    def members(self, link: Link, rank: int) -> tuple[int, ...]:
        """The ranks that share `link` with `rank`, in the order of slices, of ladders (tensor link) or of tokens (context link)."""
        data_rank, tensor_rank = self.data_rank_of(rank), self.tensor_rank_of(rank)
        if link is Link.TENSOR:
            return tuple(self.rank_of(data_rank, ladder) for ladder in range(self.tensor_ranks))
        if link is Link.CONTEXT:
            first = self.sample_group_of(rank) * self.context_ranks
            return tuple(self.rank_of(member, tensor_rank) for member in range(first, first + self.context_ranks))
        return tuple(self.rank_of(member, tensor_rank) for member in self.ladder.members(link, data_rank))

    def link_ranks(self, link: Link) -> int:
        """The number of ranks that share one link."""
        if link is Link.CONTEXT:
            return self.context_ranks
        return self.tensor_ranks if link is Link.TENSOR else self.ladder.link_ranks(link)

    def peers(self, link: Link, rank: int) -> Peers:
        """Those that share `link` with `rank`."""
        return _peers(self, link, rank)

    def groups(self, link: Link) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that share `link`, in the order of their first ranks."""
        return tuple(sorted({self.members(link, rank) for rank in range(self.world_size)}))

    def into_node(self, bytes_into_rank: int) -> int:
        """Bytes that enter one node, given the bytes that enter each of its ranks; payloads are equal on every rank."""
        return bytes_into_rank * self.ranks_per_node

    def share_node(self, rank: int, other: int) -> bool:
        """Whether two ranks are on the same node."""
        return rank // self.ranks_per_node == other // self.ranks_per_node


@cache  # a ledger asks for each hop, and a link of thousands of ranks is long to count
def _peers(grid: Grid, link: Link, rank: int) -> Peers:
    members = grid.members(link, rank)
    local = sum(grid.share_node(rank, member) for member in members)
    return Peers(local - 1, len(members) - local)
