"""Counts the bytes that each rank receives, from other nodes and from its own, by category."""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass, field

from megatron_zpp.parallel.grid import Grid, Peers
from megatron_zpp.parallel.topology import Link


class Category(enum.Enum):
    """The purpose for which bytes were received."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    CONTROL = "control"
    EVALUATION = "evaluation"
    ACTIVATIONS = "activations"
    EXCHANGES = "exchanges"
    REPLICAS = "replicas"
    OUTER = "outer"  # of outer steps, between islands
    COPIES = "copies"  # of a checkpoint's files; the first rank of a node receives all of the node, in a thread that books nothing else


@dataclass(frozen=True)
class Traffic:
    """Bytes received by one rank, each counted once, but for the last.

    inter_bytes, intra_bytes: over its ladder, from ranks of other nodes and of its own. tensor_bytes: from ranks of other ladders.
    context_bytes: from ranks that divide its samples; context_inter_bytes: those of them that come from other nodes.
    """

    inter_bytes: int = 0
    intra_bytes: int = 0
    tensor_bytes: int = 0
    context_bytes: int = 0
    context_inter_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.sub, vars(self).values(), vars(other).values()))

    def __mul__(self, times: int) -> Traffic:
        return Traffic(*(nbytes * times for nbytes in vars(self).values()))


@dataclass
class Ledger:
    """The bytes that one rank has received, by category; of numbers that all ranks gather, its part of what its node has received.

    The traffic of a hop is measured when the hop is made, and booked when its result is waited for. So a climb that was submitted ahead
    counts in the step whose forward waits for it.
    """

    grid: Grid
    rank: int
    _booked: dict[Category, Traffic] = field(default_factory=lambda: {category: Traffic() for category in Category})

    def measure(self, link: Link, bytes_per_member: int) -> Traffic:
        """What this rank receives if every other member of `link` sends it `bytes_per_member`."""
        return link_traffic(self.grid, self.rank, link, bytes_per_member)

    def measure_world(self, bytes_per_member: int) -> Traffic:
        """This rank's part of what its node receives while all ranks gather `bytes_per_member` of each (parallel/gathers.py).

        The first rank of a node receives those of all other nodes once, and gives them to the R - 1 others.
        """
        others, nodes = self.grid.ranks_per_node - 1, self.grid.nodes
        given = nodes if nodes > 1 else 0  # to the others, by the first rank
        return Traffic((nodes - 1) * bytes_per_member, others * (1 + given) * bytes_per_member)

    def book(self, category: Category, traffic: Traffic) -> None:
        self._booked[category] += traffic

    def total(self, *categories: Category) -> Traffic:
        """Everything booked under `categories` since the start."""
        total = Traffic()
        for category in categories:
            total += self._booked[category]
        return total

    def inter_node_bytes(self, traffic: Traffic) -> int:
        """Bytes of ladders that enter one node, computed from those that enter one of its ranks."""
        return self.grid.into_node(traffic.inter_bytes)

    def context_inter_node_bytes(self, traffic: Traffic) -> int:
        """Bytes of context links that enter one node, computed from those that enter one of its ranks."""
        return self.grid.into_node(traffic.context_inter_bytes)


def link_traffic(grid: Grid, rank: int, link: Link, bytes_per_member: int) -> Traffic:
    """What `rank` receives if every other member of its `link` sends it `bytes_per_member`."""
    received = _from(grid.peers(link, rank), bytes_per_member)
    if link is Link.TENSOR:
        return Traffic(tensor_bytes=received.intra_bytes)
    if link is Link.CONTEXT:
        return Traffic(context_bytes=received.inter_bytes + received.intra_bytes, context_inter_bytes=received.inter_bytes)
    return received


def _from(peers: Peers, bytes_per_member: int) -> Traffic:
    return Traffic(peers.remote * bytes_per_member, peers.local * bytes_per_member)
