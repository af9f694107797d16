"""Lists the hops of one unit: the bytes of each, and the encoding and decoding around it (pure arithmetic, no torch).

The hops are those of comm/links.py, for one rank of N partitions of G ranks. A payload holds one slice of the unit. A rank receives:

    climb      inter: a payload from each other partition   intra: N payloads from each other rank of the partition
    descend    intra: N payloads from each other rank       inter: a payload from each other partition
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_zpp.comm.code import Code, Levels
from megatron_zpp.comm.ledger import Traffic, link_traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Direction, Lane, Link
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.plan.memory_plan import Sharding


@dataclass(frozen=True)
class CodecWork:
    """Numbers of values that one rank encodes and decodes. Values that are not quantized count as 0.

    encoded, decoded, summed: in integers. summed: values that are decoded to take a mean over several members; a mean of n values over m
    members counts n x m.
    gaussian_encoded, gaussian_decoded: in Gaussian codes; every member of a mean is decoded by itself. rotated: the same values, once for
    each round of their rotation. subtracted: values from which a kept copy is subtracted before they are encoded.
    """

    encoded: int = 0
    decoded: int = 0
    summed: int = 0
    gaussian_encoded: int = 0
    gaussian_decoded: int = 0
    rotated: int = 0
    subtracted: int = 0

    @property
    def encodes(self) -> bool:
        """Whether any value is encoded."""
        return self.encoded + self.gaussian_encoded > 0

    def __add__(self, other: CodecWork) -> CodecWork:
        return CodecWork(*map(operator.add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class PlannedHop:
    """One hop of one unit on one rank. before, after: the codec's work before and after the collective.

    host_bytes: of the payload that comes up from the host before the collective. unit: "" if it is one of several alike.
    """

    lane: Lane
    traffic: Traffic
    before: CodecWork
    after: CodecWork
    host_bytes: int = 0
    unit: str = ""

    def of_unit(self, name: str) -> PlannedHop:
        return replace(self, unit=name)


class UnitHops:
    """The hops of all units with this layout; every rank has the same."""

    def __init__(self, layout: FlatLayout, sharding: Sharding, grid: Grid) -> None:
        self._layout = layout
        self._sharding = sharding
        self._grid = grid
        topology = grid.ladder
        self._partitions = topology.partitions
        self._partition_ranks = topology.partition_ranks
        policy = sharding.policy.in_world(topology)
        self._weights = policy.weight_codes
        self._sends_differences = policy.sends_differences
        self._gradients = policy.gradient_codes

    @cached_property
    def climb(self) -> tuple[PlannedHop, PlannedHop]:
        """Over the inter link to the secondary rung, then over the intra link to the full one."""
        codes, partitions = self._weights, self._partitions
        after = CodecWork() if codes.are_alike else self._mean(codes.inter, partitions, 1) + self._encode(codes.intra, partitions)
        subtract = CodecWork(subtracted=self._layout.runs.blocks if self._sends_differences else 0)
        inter = self._hop(Link.INTER, Direction.CLIMB, self._payload(codes.inter), subtract + self._encode(codes.inter, 1), after)
        decode = self._decode(codes.intra, self._layout.numel)
        return inter, self._hop(Link.INTRA, Direction.CLIMB, partitions * self._payload(codes.intra), after=decode)

    @cached_property
    def first_climb(self) -> tuple[PlannedHop, PlannedHop]:
        """The same after an update on the host, from which the payload comes up."""
        inter, intra = self.climb
        return replace(inter, host_bytes=self._payload(self._weights.inter)), intra

    @cached_property
    def descend(self) -> tuple[PlannedHop, PlannedHop]:
        """Over the intra link, then over the inter link, each followed by a mean."""
        codes, partitions, partition_ranks = self._gradients, self._partitions, self._partition_ranks
        within = self._encode(codes.intra, self._layout.slices) if partition_ranks > 1 else CodecWork()
        mean_within = self._mean(codes.intra, partitions, partition_ranks) if partition_ranks > 1 else CodecWork()
        across = self._encode(codes.inter, partitions) if partitions > 1 else CodecWork()
        mean_across = self._mean(codes.inter, 1, partitions) if partitions > 1 else CodecWork()
        return (
            self._hop(Link.INTRA, Direction.DESCEND, partitions * self._payload(codes.intra), within),
            self._hop(Link.INTER, Direction.DESCEND, self._payload(codes.inter), mean_within + across, mean_across),
        )

    @cached_property
    def climb_of_mean(self) -> tuple[PlannedHop, PlannedHop]:
        """The climb of the fp32 mean gradient, if the optimizer is kept on the full rung."""
        mean = self._sharding.mean_payload_bytes(self._layout.runs)
        inter = self._hop(Link.INTER, Direction.CLIMB, mean)
        return inter, self._hop(Link.INTRA, Direction.CLIMB, self._partitions * mean)

    def _hop(
        self, link: Link, direction: Direction, bytes_per_member: int, before: CodecWork = CodecWork(), after: CodecWork = CodecWork()
    ) -> PlannedHop:
        return PlannedHop(Lane(link, direction), link_traffic(self._grid, 0, link, bytes_per_member), before, after)

    def _payload(self, code: Code) -> int:
        return self._sharding.payload_bytes(code, self._layout.runs)

    def _encode(self, code: Code, slices: int) -> CodecWork:
        numel = 0 if code.is_exact else slices * self._layout.runs.blocks
        if code.levels is Levels.GAUSSIAN:
            return CodecWork(gaussian_encoded=numel, rotated=code.rounds * numel)
        return CodecWork(encoded=numel)

    def _decode(self, code: Code, numel: int) -> CodecWork:
        if code.levels is Levels.GAUSSIAN:
            return CodecWork(gaussian_decoded=numel, rotated=code.rounds * numel)
        return CodecWork(decoded=0 if code.is_exact else numel)

    def _mean(self, code: Code, slices: int, members: int) -> CodecWork:
        numel = members * slices * self._layout.runs.blocks
        if code.levels is Levels.GAUSSIAN:
            return self._decode(code, numel)
        return CodecWork(summed=0 if code.is_exact else numel)
