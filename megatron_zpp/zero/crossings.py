"""What one unit sends over the links: each hop's bytes and the encoding and decoding around it (pure arithmetic, no torch).

The hops are those of comm/links.py, for one rank of N nodes of G ranks; a payload is one slice of the unit.

    climb      inter: a payload from each other node        intra: N payloads from each other rank of the node
    descend    intra: N payloads from each other rank       inter: a payload from each other node
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.comm.ledger import Traffic
from megatron_zpp.parallel.topology import Direction, Lane, Link, Topology
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.memory_plan import MAIN_BYTES, Sharding, bits_in_world, payload_bytes

EXACT_BITS = 16


@dataclass(frozen=True)
class CodecWork:
    """Values that one rank turns into integers or back; what crosses as it is costs nothing here.

    encoded, decoded: values. summed: values times members of the means that are decoded.
    """

    encoded: int = 0
    decoded: int = 0
    summed: int = 0

    def __add__(self, other: CodecWork) -> CodecWork:
        return CodecWork(self.encoded + other.encoded, self.decoded + other.decoded, self.summed + other.summed)


@dataclass(frozen=True)
class Crossing:
    """One hop of one unit on one rank. before, after: the codec's work before the collective and when it has ended."""

    unit: str
    lane: Lane
    traffic: Traffic
    before: CodecWork = CodecWork()
    after: CodecWork = CodecWork()


class UnitCrossings:
    """The hops of one unit; every rank has the same."""

    def __init__(self, name: str, layout: FlatLayout, sharding: Sharding, topology: Topology) -> None:
        self._name = name
        self._layout = layout
        self._sharding = sharding
        self._topology = topology
        self._nodes = topology.link_ranks(Link.INTER)
        self._partition_ranks = topology.link_ranks(Link.INTRA)
        self._weights = bits_in_world(sharding.policy.weight_bits, topology)
        self._gradients = bits_in_world(sharding.policy.gradient_bits, topology)

    def climb(self) -> tuple[Crossing, Crossing]:
        """Over the inter link to the secondary rung, then over the intra link to the full one."""
        bits = self._weights
        after = CodecWork() if bits.inter == bits.intra else self._mean(bits.inter, self._nodes, 1) + self._encode(bits.intra, self._nodes)
        inter = self._crossing(Link.INTER, Direction.CLIMB, self._payload(bits.inter), self._encode(bits.inter, 1), after)
        decode = CodecWork(decoded=self._layout.numel if bits.intra < EXACT_BITS else 0)
        return inter, self._crossing(Link.INTRA, Direction.CLIMB, self._nodes * self._payload(bits.intra), after=decode)

    def descend(self) -> tuple[Crossing, Crossing]:
        """Over the intra link, then over the inter link, with the mean of each."""
        bits, nodes, partition_ranks = self._gradients, self._nodes, self._partition_ranks
        within = self._encode(bits.intra, self._layout.slices) if partition_ranks > 1 else CodecWork()
        mean_within = self._mean(bits.intra, nodes, partition_ranks) if partition_ranks > 1 else CodecWork()
        across = self._encode(bits.inter, nodes) if nodes > 1 else CodecWork()
        mean_across = self._mean(bits.inter, 1, nodes) if nodes > 1 else CodecWork()
        return (
            self._crossing(Link.INTRA, Direction.DESCEND, nodes * self._payload(bits.intra), within),
            self._crossing(Link.INTER, Direction.DESCEND, self._payload(bits.inter), mean_within + across, mean_across),
        )

    def climb_of_mean(self) -> tuple[Crossing, Crossing]:
        """The fp32 mean gradient back up, where the optimizer rests full."""
        runs = (self._layout.blocks_run, self._layout.exact_run)
        mean = payload_bytes(runs, EXACT_BITS, self._sharding.block_numel, MAIN_BYTES)
        inter = self._crossing(Link.INTER, Direction.CLIMB, mean)
        return inter, self._crossing(Link.INTRA, Direction.CLIMB, self._nodes * mean)

    def _crossing(
        self, link: Link, direction: Direction, bytes_per_member: int, before: CodecWork = CodecWork(), after: CodecWork = CodecWork()
    ) -> Crossing:
        topology = self._topology
        others = [member for member in topology.members(link, 0) if member != 0]
        within = sum(topology.share_node(0, member) for member in others)
        traffic = Traffic((len(others) - within) * bytes_per_member, within * bytes_per_member)
        return Crossing(self._name, Lane(link, direction), traffic, before, after)

    def _payload(self, bits: int) -> int:
        runs = (self._layout.blocks_run, self._layout.exact_run)
        return payload_bytes(runs, bits, self._sharding.block_numel, self._sharding.element_bytes)

    def _encode(self, bits: int, slices: int) -> CodecWork:
        return CodecWork(encoded=slices * self._layout.blocks_run if bits < EXACT_BITS else 0)

    def _mean(self, bits: int, slices: int, members: int) -> CodecWork:
        return CodecWork(summed=members * slices * self._layout.blocks_run if bits < EXACT_BITS else 0)
