"""Arranges data-parallel ranks in partitions of equal size, joined by two links (pure arithmetic, no torch).

A world of W = N x G ranks, drawn for N = 2 partitions of G = 3 ranks, with each rank's primary slice in brackets:

                      place j = 0      j = 1       j = 2
    partition n = 0    rank 0 [0]    rank 1 [2]  rank 2 [4]     <- intra link: the ranks of one row
    partition n = 1    rank 3 [1]    rank 4 [3]  rank 5 [5]
                           ^
                           inter link: the ranks of one column

A *node* is a machine, or a part of one that stands for a node (--ranks-per-node). A *partition* is the group of ranks that splits a
secondary rung: a node, or an equal part of one (--zero-hpz-partition-size). If a partition is smaller than a node, some members of the
inter link share a node; the ledger counts their bytes separately from those that enter the node.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zpp.config.flag import divisors


class Link(enum.Enum):
    """The two links of the ladder: between the partitions, and between the ranks of one partition."""

    INTER = "inter"
    INTRA = "intra"


class Direction(enum.Enum):
    """The direction in which a payload crosses a link: weights climb, gradients descend."""

    CLIMB = "climb"
    DESCEND = "descend"


@dataclass(frozen=True)
class Lane:
    """One direction of one link. It has a process group of its own, so that its messages cannot mix with those of another lane."""

    link: Link
    direction: Direction

    def __str__(self) -> str:
        return f"{self.link.value}-{self.direction.value}"


LANES = tuple(Lane(link, direction) for direction in Direction for link in Link)
# How many collectives of a lane may be under way. A sender over TCP first asks whether the receiver is ready. With two collectives under
# way, the second asks while the first sends its data. torch's gloo has two threads per process group.
MOST_CROSSING = 2


@dataclass(frozen=True)
class Topology:
    """The world of data-parallel ranks as N partitions of G = `partition_ranks` ranks each.

    ranks_per_node: ranks of one node; the ledger counts the bytes between nodes.
    partition_ranks: G, the ranks among which a secondary rung is split; a divisor of ranks_per_node.
    Raises ValueError if a number is not positive or does not divide.
    """

    world_size: int
    ranks_per_node: int
    partition_ranks: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.ranks_per_node < 1 or self.partition_ranks < 1:
            raise ValueError(
                f"{self.world_size} ranks, {self.ranks_per_node} per node, {self.partition_ranks} per partition: all must be positive"
            )
        if self.world_size % self.ranks_per_node:
            raise ValueError(
                f"--ranks-per-node {self.ranks_per_node} does not divide the world size {self.world_size}; "
                f"choose {_divisors(self.world_size)}"
            )
        if self.ranks_per_node % self.partition_ranks:
            raise ValueError(
                f"a partition of {self.partition_ranks} ranks does not divide the {self.ranks_per_node} ranks of a node; "
                f"choose {_divisors(self.ranks_per_node)}"
            )

    @classmethod
    def of_nodes(cls, nodes: int, ranks_per_node: int) -> Topology:
        """A world of `nodes` nodes, each of which is one partition."""
        return cls(nodes * ranks_per_node, ranks_per_node, ranks_per_node)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.world_size // self.ranks_per_node

    @property
    def partitions(self) -> int:
        """N, the number of partitions, and so of copies of a secondary rung."""
        return self.world_size // self.partition_ranks

    def link_ranks(self, link: Link) -> int:
        """The number of ranks that share one link: N over the inter link, G over the intra link."""
        return self.partitions if link is Link.INTER else self.partition_ranks

    def partition_of(self, rank: int) -> int:
        """The partition n of `rank`.

        It is also the index of the rank's own slice among the N slices of its secondary rung: these are the slices of the N ranks of one
        column, in the order of their partitions.
        """
        return rank // self.partition_ranks

    def place_of(self, rank: int) -> int:
        """The place j of `rank` in its partition, from 0 to G - 1."""
        return rank % self.partition_ranks

    def slice_of(self, rank: int) -> int:
        """The primary slice that `rank` owns. The ranks of a column own neighbouring slices, so both links deliver slices in order."""
        return self.place_of(rank) * self.partitions + self.partition_of(rank)

    def members(self, link: Link, rank: int) -> tuple[int, ...]:
        """The ranks that share `link` with `rank`, in the order of their slices."""
        if link is Link.INTER:
            return tuple(partition * self.partition_ranks + self.place_of(rank) for partition in range(self.partitions))
        first = self.partition_of(rank) * self.partition_ranks
        return tuple(range(first, first + self.partition_ranks))

    def groups(self, link: Link) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that share `link`, in the order of their first ranks."""
        return tuple(sorted({self.members(link, rank) for rank in range(self.world_size)}))

    def into_node(self, bytes_into_rank: int) -> int:
        """Bytes that enter one node, given the bytes that enter each of its ranks; payloads are equal on every rank."""
        return bytes_into_rank * self.ranks_per_node

    def share_node(self, rank: int, other: int) -> bool:
        """Whether two ranks are on the same node."""
        return rank // self.ranks_per_node == other // self.ranks_per_node


def check_placement(hosts: Sequence[str], ranks_per_node: int) -> None:
    """Raises ValueError, naming ranks and hosts, unless the ranks of each node share a host; `hosts[rank]` is the host name of a rank.

    The ranks of a node are consecutive. Several nodes may be on one host, as parts of it, but no node may be on several hosts.
    """
    for first in range(0, len(hosts), ranks_per_node):
        names = sorted(set(hosts[first : first + ranks_per_node]))
        if len(names) > 1:
            raise ValueError(
                f"ranks {first} to {first + ranks_per_node - 1} form one node (--ranks-per-node {ranks_per_node}) "
                f"but run on several hosts: {', '.join(names)}; "
                "start the ranks of a node consecutively on one host, or lower --ranks-per-node"
            )


def _divisors(number: int) -> str:
    return ", ".join(map(str, divisors(number)))
