"""The bytes that each rank receives, by link of the physical machine and by category."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from megatron_zpp.parallel.topology import Link, Topology


class Category(enum.Enum):
    """What bytes were moved for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    CONTROL = "control"
    EVALUATION = "evaluation"


@dataclass(frozen=True)
class Traffic:
    """Bytes received by one rank: from ranks of other physical nodes, and from ranks of its own."""

    inter_bytes: int = 0
    intra_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.inter_bytes + other.inter_bytes, self.intra_bytes + other.intra_bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.inter_bytes - other.inter_bytes, self.intra_bytes - other.intra_bytes)


@dataclass
class Ledger:
    """The account of one rank. Traffic is measured where a collective starts and booked where somebody asks for its result:
    a climb that was started ahead belongs to the step whose forward waits for it."""

    topology: Topology
    rank: int
    _booked: dict[Category, Traffic] = field(default_factory=lambda: {category: Traffic() for category in Category})

    def measure(self, link: Link, bytes_per_member: int) -> Traffic:
        """What this rank receives when every other member of `link` sends it `bytes_per_member`."""
        return self._from_ranks(self.topology.members(link, self.rank), bytes_per_member)

    def measure_world(self, bytes_per_member: int) -> Traffic:
        """What this rank receives when every other rank of the world sends it `bytes_per_member`."""
        return self._from_ranks(range(self.topology.world_size), bytes_per_member)

    def book(self, category: Category, traffic: Traffic) -> None:
        self._booked[category] += traffic

    def total(self, *categories: Category) -> Traffic:
        """Everything booked under `categories` since the start."""
        total = Traffic()
        for category in categories:
            total += self._booked[category]
        return total

    def inter_node_bytes(self, traffic: Traffic) -> int:
        """Bytes entering one physical node, from the bytes entering one of its ranks: payloads are equal on every rank."""
        return traffic.inter_bytes * self.topology.ranks_per_node

    def _from_ranks(self, ranks: range | tuple[int, ...], bytes_per_member: int) -> Traffic:
        others = [rank for rank in ranks if rank != self.rank]
        within = sum(self.topology.share_node(self.rank, other) for other in others)
        return Traffic((len(others) - within) * bytes_per_member, within * bytes_per_member)
