"""Arranges the data ranks of a ladder in partitions of equal size, joined by two links (pure arithmetic, no torch).

D = N x G data ranks, drawn for N = 2 partitions of G = 3 ranks, with each rank's primary slice in brackets:

                      place j = 0      j = 1       j = 2
    partition n = 0    rank 0 [0]    rank 1 [2]  rank 2 [4]     <- intra link: the ranks of one row
    partition n = 1    rank 3 [1]    rank 4 [3]  rank 5 [5]
                           ^
                           inter link: the ranks of one column

A *node* is a machine, or a part of one that stands for a node (--ranks-per-node). A *partition* is the group of ranks that splits a
secondary rung: a node, or an equal part of one (--zero-hpz-partition-size). If a partition is smaller than a node, some members of the
inter link share a node; the ledger counts their bytes separately from those that enter the node.

All ranks here are data ranks. parallel/grid.py says which processes they are.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zpp.config.counted import counted
from megatron_zpp.config.flag import any_of, divisors
from megatron_zpp.system.user_error import UserError


class Link(enum.Enum):
    """The links of a rank: in its ladder, between the partitions and inside one; to other ladders; to those that divide its samples."""

    INTER = "inter"
    INTRA = "intra"
    TENSOR = "tensor"
    CONTEXT = "context"
    __hash__ = object.__hash__  # lanes are looked up for every message, and Enum's own hash is computed in Python


class Direction(enum.Enum):
    """The direction in which a payload crosses a link: weights climb and gradients descend a ladder, activations go across."""

    CLIMB = "climb"
    DESCEND = "descend"
    ACROSS = "across"
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Lane:
    """One direction of one link. It has a process group of its own, so that its messages cannot mix with those of another lane."""

    link: Link
    direction: Direction

    def __str__(self) -> str:
        return f"{self.link.value}-{self.direction.value}"


LADDER_LINKS = (Link.INTER, Link.INTRA)
# Of a ladder.
LANES = tuple(Lane(link, direction) for direction in (Direction.CLIMB, Direction.DESCEND) for link in LADDER_LINKS)
# Of activations: to the ranks of other ladders with the same tokens, and to those of the same ladder with other tokens of the samples.
TENSOR_ACROSS, CONTEXT_ACROSS = Lane(Link.TENSOR, Direction.ACROSS), Lane(Link.CONTEXT, Direction.ACROSS)
ACROSS_LANES = (TENSOR_ACROSS, CONTEXT_ACROSS)
# How many collectives of a lane may be under way. A sender over TCP first asks whether the receiver is ready. With two collectives under
# way, the second asks while the first sends its data. torch's gloo has two threads per process group.
MOST_CROSSING = 2


@dataclass(frozen=True)
class Topology:
    """The data ranks of one ladder as N partitions of G = `partition_ranks` ranks each.

    ranks_per_node: those of one node. partition_ranks: G, the ranks among which a secondary rung is split; a divisor of ranks_per_node.
    Raises UserError if a number is not positive or does not divide.
    """

    data_ranks: int
    ranks_per_node: int
    partition_ranks: int

    def __post_init__(self) -> None:
        if self.data_ranks < 1 or self.ranks_per_node < 1 or self.partition_ranks < 1:
            raise UserError(
                f"{self.data_ranks} ranks, {self.ranks_per_node} per node, {self.partition_ranks} per partition: all must be positive"
            )
        if self.data_ranks % self.ranks_per_node:
            raise UserError(
                f"--ranks-per-node {self.ranks_per_node} does not divide the {counted(self.data_ranks, 'data rank')}; "
                f"choose {any_of(divisors(self.data_ranks))}"
            )
        if self.ranks_per_node % self.partition_ranks:
            raise UserError(
                f"a partition of {self.partition_ranks} ranks does not divide the {counted(self.ranks_per_node, 'rank')} of a node; "
                f"choose {any_of(divisors(self.ranks_per_node))}"
            )

    @classmethod
    def of_nodes(cls, nodes: int, ranks_per_node: int) -> Topology:
        """A ladder over `nodes` nodes, each of which is one partition."""
        return cls(nodes * ranks_per_node, ranks_per_node, ranks_per_node)

    @property
    def partitions(self) -> int:
        """N, the number of partitions, and so of copies of a secondary rung."""
        return self.data_ranks // self.partition_ranks

    @property
    def is_one_rank(self) -> bool:
        """Whether the ladder has one rank. Then every rung is the whole unit, and nothing crosses a link."""
        return self.data_ranks == 1

    def link_ranks(self, link: Link) -> int:
        """The number of ranks that share one link: N over the inter link, G over the intra link. RuntimeError for a link of no ladder."""
        if link is Link.INTER:
            return self.partitions
        if link is Link.INTRA:
            return self.partition_ranks
        raise RuntimeError(f"{link} is not a link of a ladder")

    def partition_of(self, data_rank: int) -> int:
        """The partition n of `data_rank`.

        It is also the index of the rank's own slice among the N slices of its secondary rung: these are the slices of the N ranks of one
        column, in the order of their partitions.
        """
        return data_rank // self.partition_ranks

    def place_of(self, data_rank: int) -> int:
        """The place j of `data_rank` in its partition, from 0 to G - 1."""
        return data_rank % self.partition_ranks

    def slice_of(self, data_rank: int) -> int:
        """The primary slice that `data_rank` owns. The ranks of a column own neighbouring slices, so both links deliver slices in order."""
        return self.place_of(data_rank) * self.partitions + self.partition_of(data_rank)

    def members(self, link: Link, data_rank: int) -> tuple[int, ...]:
        """The data ranks that share a link with `data_rank`, in the order of their slices. Raises RuntimeError for a link of no ladder."""
        if link is Link.INTER:
            return tuple(range(self.place_of(data_rank), self.data_ranks, self.partition_ranks))
        if link is Link.INTRA:
            first = self.partition_of(data_rank) * self.partition_ranks
            return tuple(range(first, first + self.partition_ranks))
        raise RuntimeError(f"{link} is not a link of a ladder")


def check_placement(hosts: Sequence[str], ranks_per_node: int) -> None:
    """Raises UserError, naming ranks and hosts, unless the ranks of each node share a host; `hosts[rank]` is the host name of a rank.

    The ranks of a node are consecutive. Several nodes may be on one host, as parts of it, but no node may be on several hosts.
    """
    for first in range(0, len(hosts), ranks_per_node):
        names = sorted(set(hosts[first : first + ranks_per_node]))
        if len(names) > 1:
            raise UserError(
                f"ranks {first} to {first + ranks_per_node - 1} form one node (--ranks-per-node {ranks_per_node}) "
                f"but run on several hosts: {', '.join(names)}; "
                "start the ranks of a node consecutively on one host, or lower --ranks-per-node"
            )
