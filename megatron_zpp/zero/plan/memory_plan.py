"""Predicts the memory that one rank needs, from units, policy and world alone (no torch).

The bytes of states are exact: the engine reports the same at the end of a step's last backward. Those of gathered units and buffers are the
largest that the schedule and the lanes allow at one time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_zpp.comm.code import EXACT, Code, Runs
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.descents import LARGEST_UNDER_WAY
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.norm_memory import norm_bytes
from megatron_zpp.zero.policy import Policy, Rung
from megatron_zpp.zero.schedule import Prefetch, evaluation_schedule, training_schedule

MAIN_BYTES = 4  # a main weight, its gradient, or one of Adam's two moments, in fp32
ADAM_MOMENTS = 2


@dataclass(frozen=True)
class Sharding:
    """How units are sharded. element_bytes: of a working weight."""

    policy: Policy
    block_numel: int
    element_bytes: int
    prefetch: Prefetch

    def payload_bytes(self, code: Code, runs: Runs) -> int:
        """Bytes of one slice's payload in `code`."""
        return code.payload_bytes(runs, element_bytes=self.element_bytes, block_numel=self.block_numel)

    def mean_payload_bytes(self, runs: Runs) -> int:
        """Bytes of one slice of the fp32 mean gradient, which climbs back if the optimizer is kept on the full rung."""
        return EXACT.payload_bytes(runs, element_bytes=MAIN_BYTES)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank.

    weights: main weights, and working weights if they are kept on the full rung. secondary: secondary rungs and encoded payloads that are
    kept within a step. gathered: units that are full at the same time. buffers: payloads on their way. norm: needed by the gradient norm
    while it is computed.
    """

    weights: int
    gradients: int
    optimizer_state: int
    secondary: int
    gathered: int
    buffers: int
    norm: int

    @property
    def states(self) -> int:
        """The bytes of weights, gradients, optimizer state and secondary copies."""
        return self.weights + self.gradients + self.optimizer_state + self.secondary


def plan_memory(unit_specs: Sequence[UnitSpec], uses: Sequence[Use], sharding: Sharding, topology: Topology) -> MemoryPlan:
    """The memory that each rank needs on a ladder of this topology."""
    layouts = {spec.name: FlatLayout(spec.params, topology.data_ranks, sharding.block_numel) for spec in unit_specs}
    units = [_PlannedUnit(layout, sharding, topology) for layout in layouts.values()]
    same_size = Counter(units)
    return MemoryPlan(
        weights=sum(unit.weights_bytes() for unit in units),
        gradients=sum(unit.gradient_bytes() for unit in units),
        optimizer_state=sum(ADAM_MOMENTS * MAIN_BYTES * unit.main_numel() for unit in units),
        secondary=sum(unit.secondary_bytes() for unit in units),
        gathered=_gathered_bytes(uses, sharding, {name: layout.numel for name, layout in layouts.items()}),
        buffers=sum(unit.buffer_bytes(count) for unit, count in same_size.items()),
        norm=max(norm_bytes(layout.runs) for layout in layouts.values()),
    )


class _PlannedUnit:
    """The bytes of one unit. Units of equal runs compare equal, because they share buffers."""

    def __init__(self, layout: FlatLayout, sharding: Sharding, topology: Topology) -> None:
        self.slice_numel = layout.slice_numel
        self._runs = layout.runs
        self._sharding = sharding
        self._policy = sharding.policy
        self._topology = topology
        self._data_ranks = topology.data_ranks
        self._partitions = topology.partitions
        self._partition_ranks = topology.partition_ranks
        self._weight_codes = self._policy.weight_codes.in_world(topology)
        self._gradient_codes = self._policy.gradient_codes.in_world(topology)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PlannedUnit) and self._runs == other._runs

    def __hash__(self) -> int:
        return hash(self._runs)

    def main_numel(self) -> int:
        return self._policy.optimizer.slices(self._topology) * self.slice_numel

    def weights_bytes(self) -> int:
        working = self._sharding.element_bytes * self._full_numel() if self._policy.weights_in_step is Rung.FULL else 0
        return MAIN_BYTES * self.main_numel() + working

    def gradient_bytes(self) -> int:
        return MAIN_BYTES * self._policy.gradients.slices(self._topology) * self.slice_numel

    def secondary_bytes(self) -> int:
        if self._policy.weights_in_step is Rung.SECONDARY:
            return self._partitions * self._payload_bytes(self._weight_codes.intra)
        inter = self._weight_codes.inter
        return self._payload_bytes(inter) if self._policy.keeps_payloads(encodes=not inter.is_exact) else 0

    def buffer_bytes(self, count: int) -> int:
        """Payloads on their way at the same time, if `count` units have this size."""
        descents = LARGEST_UNDER_WAY + 1  # and one that autograd fills
        return self._climb_bytes(count) + min(count, descents) * self._descent_bytes()

    def _climb_bytes(self, count: int) -> int:
        if self._policy.optimizer is Rung.FULL:
            return 0
        codes, partitions = self._weight_codes, self._partitions
        inter, intra = self._payload_bytes(codes.inter), self._payload_bytes(codes.intra)
        to_secondary = (inter if partitions > 1 else 0) + (0 if self._policy.weights_in_step is Rung.SECONDARY else partitions * intra)
        if partitions > 1 and not codes.are_alike:
            to_secondary += partitions * inter
        to_full = self._data_ranks * intra if self._partition_ranks > 1 else 0
        prefetch = self._sharding.prefetch
        return min(count, 1 + prefetch.inter_uses) * to_secondary + min(count, 1 + prefetch.intra_uses) * to_full

    def _descent_bytes(self) -> int:
        exchanged = 2 * self._data_ranks * self._payload_bytes(self._gradient_codes.intra) if self._partition_ranks > 1 else 0
        exchanged += 2 * self._partitions * self._payload_bytes(self._gradient_codes.inter) if self._partitions > 1 else 0
        if self._policy.gradients is not Rung.FULL:
            return exchanged + self._sharding.element_bytes * self._full_numel()
        return exchanged + (self._climb_back_bytes() if self._policy.optimizer is Rung.FULL else 0)

    def _climb_back_bytes(self) -> int:
        """Buffers for the climb of the fp32 mean, if the optimizer is kept on the full rung."""
        mean = self._sharding.mean_payload_bytes(self._runs)
        gathered = self._data_ranks * mean if self._partition_ranks > 1 else 0
        return gathered + self._partitions * mean + (mean if self._partitions > 1 else 0)

    def _payload_bytes(self, code: Code) -> int:
        return self._sharding.payload_bytes(code, self._runs)

    def _full_numel(self) -> int:
        return self._data_ranks * self.slice_numel


def _gathered_bytes(uses: Sequence[Use], sharding: Sharding, numel_of: dict[str, int]) -> int:
    if sharding.policy.weights_in_step is Rung.FULL:
        return 0
    largest = 0
    for schedule in (training_schedule(uses, sharding.prefetch), evaluation_schedule(uses, sharding.prefetch)):
        full: set[str] = set()
        for actions in schedule.values():
            full = (full - set(actions.rest)) | set(actions.climb_to_full)
            largest = max(largest, sum(numel_of[name] for name in full))
    return sharding.element_bytes * largest


def largest_plan(
    unit_specs: Sequence[UnitSpec], uses: Sequence[Use], sharding: Sharding, topology: Topology, *, starts_exact: bool
) -> MemoryPlan:
    """The plan of a run; if its first iterations are in full precision (`starts_exact`), the larger of the two plans."""
    plans = [plan_memory(unit_specs, uses, sharding, topology)]
    if starts_exact:
        plans.append(plan_memory(unit_specs, uses, replace(sharding, policy=sharding.policy.in_full_precision()), topology))
    return max(plans, key=lambda plan: plan.states + plan.gathered + plan.buffers)
