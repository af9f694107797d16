"""Predicts the memory that one rank needs on its device and on the host, from units, policy and world alone (no torch).

The bytes of states are exact: the engine reports the same at the end of a step's last backward. Those of gathered units and buffers are the
largest that the schedule and the lanes allow at one time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_zpp.comm.code import EXACT, Code, Levels, LinkCodes, Runs
from megatron_zpp.comm.host_slots import SLOTS
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.descents import LARGEST_UNDER_WAY
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.norm_memory import norm_bytes
from megatron_zpp.zero.policy import Policy, Rung
from megatron_zpp.zero.schedule import Phase, Prefetch, evaluation_schedule, training_schedule
from megatron_zpp.zero.update_groups import update_groups, update_order

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
class HostMemory:
    """Bytes of one rank in the memory of its host, if the optimizer's state is kept there.

    weights: main weights. mirrors: of the rank's own slices of kept copies. pinned: places of gradients on their way down, and of
    payloads on their way up. differences: fp32 values that exist while a difference of weights is encoded.
    """

    weights: int = 0
    optimizer_state: int = 0
    mirrors: int = 0
    pinned: int = 0
    differences: int = 0

    @property
    def states(self) -> int:
        """The bytes of main weights, optimizer state and mirrors."""
        return self.weights + self.optimizer_state + self.mirrors

    @property
    def total(self) -> int:
        return self.states + self.pinned + self.differences


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank's device; host: beside it.

    weights: main weights, and working weights if they are kept on the full rung. secondary: secondary rungs that are kept within a step or
    across steps, and encoded payloads that are kept within a step. gathered: units that are full at the same time; gathered_in_blocks: in
    backward of all uses but the first and the last. buffers: payloads on their way. means: fp32 values that exist while one payload is
    made from others, or while a mean is added. norm: needed by the gradient norm while it is computed.
    """

    weights: int
    gradients: int
    optimizer_state: int
    secondary: int
    gathered: int
    gathered_in_blocks: int
    buffers: int
    norm: int
    means: int
    host: HostMemory

    @property
    def states(self) -> int:
        """The bytes of weights, gradients, optimizer state and secondary copies."""
        return self.weights + self.gradients + self.optimizer_state + self.secondary


def plan_memory(
    unit_specs: Sequence[UnitSpec], uses: Sequence[Use], sharding: Sharding, topology: Topology, *, on_streams: bool = False
) -> MemoryPlan:
    """The memory that each rank needs on a ladder of this topology.

    on_streams: whether lanes are streams of a device, whose host has memory of its own. There the buffers of a hop are free for the next
    one as soon as it is submitted.
    """
    layouts = {spec.name: FlatLayout(spec.params, topology.data_ranks, sharding.block_numel) for spec in unit_specs}
    units = [_PlannedUnit(layout, sharding, topology, on_streams=on_streams) for layout in layouts.values()]
    same_size = Counter(units)
    gathered, gathered_in_blocks = _gathered_bytes(uses, sharding, {name: layout.numel for name, layout in layouts.items()})
    is_offloaded = sharding.policy.optimizer is Rung.HOST
    return MemoryPlan(
        weights=sum(unit.weights_bytes() for unit in units),
        gradients=sum(unit.gradient_bytes() for unit in units),
        optimizer_state=0 if is_offloaded else sum(unit.moments_bytes() for unit in units),
        secondary=sum(unit.secondary_bytes() for unit in units),
        gathered=gathered,
        gathered_in_blocks=gathered_in_blocks,
        buffers=sum(unit.buffer_bytes(count) for unit, count in same_size.items()),
        means=max(unit.mean_bytes() for unit in units),
        norm=max(norm_bytes(layout.runs) for layout in layouts.values()),
        host=_host_memory(units, _update_order(list(layouts), uses, sharding.prefetch), on_streams=on_streams)
        if is_offloaded
        else HostMemory(),
    )


def _update_order(names: list[str], uses: Sequence[Use], prefetch: Prefetch) -> list[int]:
    return update_order(update_groups(names, training_schedule(uses, prefetch).values(), at_once=False))


def _host_memory(units: Sequence[_PlannedUnit], update_order: Sequence[int], *, on_streams: bool) -> HostMemory:
    """update_order: indices of the units, as the optimizer updates them."""
    states = HostMemory(
        weights=sum(MAIN_BYTES * unit.main_numel() for unit in units), optimizer_state=sum(unit.moments_bytes() for unit in units)
    )
    if not on_streams:  # the device's memory is that of the host, so nothing is copied
        return states
    slices = [MAIN_BYTES * units[index].slice_numel for index in update_order]
    arrivals = sum(max(slices[turn::SLOTS]) for turn in range(min(SLOTS, len(slices))))
    return replace(
        states,
        mirrors=sum(unit.mirror_bytes() for unit in units),
        pinned=arrivals + SLOTS * max(unit.largest_own_payload_bytes() for unit in units),
        differences=max(unit.difference_bytes() for unit in units),
    )


class _PlannedUnit:
    """The bytes of one unit. Units of equal runs compare equal, because they share buffers."""

    def __init__(self, layout: FlatLayout, sharding: Sharding, topology: Topology, *, on_streams: bool) -> None:
        self.slice_numel = layout.slice_numel
        self._runs = layout.runs
        self._sharding = sharding
        self._policy = sharding.policy.in_world(topology)
        self._topology = topology
        self._is_offloaded = self._policy.optimizer is Rung.HOST
        self._climbs = not self._policy.copies_main_weights(topology)
        self._on_streams = on_streams
        self._data_ranks = topology.data_ranks
        self._partitions = topology.partitions
        self._partition_ranks = topology.partition_ranks
        self._weight_codes = self._policy.weight_codes
        self._gradient_codes = self._policy.gradient_codes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PlannedUnit) and self._runs == other._runs

    def __hash__(self) -> int:
        return hash(self._runs)

    def main_numel(self) -> int:
        return self._policy.optimizer.slices(self._topology) * self.slice_numel

    def weights_bytes(self) -> int:
        working = self._sharding.element_bytes * self._full_numel() if self._policy.weights_in_step is Rung.FULL else 0
        return working if self._is_offloaded else MAIN_BYTES * self.main_numel() + working

    def moments_bytes(self) -> int:
        return ADAM_MOMENTS * MAIN_BYTES * self.main_numel()

    def mirror_bytes(self) -> int:
        return self._sharding.element_bytes * self.slice_numel if self._policy.keeps_copy else 0

    def largest_own_payload_bytes(self) -> int:
        """Of the own slice. Where differences are sent, the first climb sends the own slice as it is."""
        whole = self._payload_bytes(EXACT) if self._policy.keeps_copy else 0
        return max(whole, self._payload_bytes(self._weight_codes.inter))

    def difference_bytes(self) -> int:
        """The fp32 difference of main weights from a kept copy, before it is encoded."""
        return MAIN_BYTES * self._runs.blocks if self._policy.sends_differences else 0

    def gradient_bytes(self) -> int:
        return MAIN_BYTES * self._policy.gradients.slices(self._topology) * self.slice_numel

    def secondary_bytes(self) -> int:
        if self._topology.is_one_rank and not self._climbs:
            return 0  # the main weights are the whole unit
        if self._policy.weights_in_step is Rung.SECONDARY:
            return self._partitions * self._payload_bytes(self._weight_codes.intra)
        inter = self._weight_codes.inter
        return self._payload_bytes(inter) if self._policy.keeps_payloads(encodes=not inter.is_exact) else 0

    def buffer_bytes(self, count: int) -> int:
        """Payloads on their way at the same time, if `count` units have this size."""
        if self._topology.is_one_rank:
            return min(count, 1 + self._sharding.prefetch.inter_uses) * self._held_by_climb_bytes() if self._climbs else 0
        prefetch = self._sharding.prefetch
        units_to_secondary, units_to_full = min(count, 1 + prefetch.inter_uses), min(count, 1 + prefetch.intra_uses)
        units_descending = min(count, LARGEST_UNDER_WAY + 1)  # and one that autograd fills
        nbytes = units_descending * self._held_by_descent_bytes() + self._crossing(units_descending) * self._descent_bytes()
        if self._policy.optimizer is Rung.FULL:
            return nbytes
        nbytes += units_to_secondary * self._held_by_climb_bytes() + self._crossing(units_to_secondary) * self._to_secondary_bytes()
        return nbytes + self._crossing(units_to_full) * self._to_full_bytes()

    def _crossing(self, units: int) -> int:
        """Of so many units on their way over a lane, those whose hop holds buffers of its own."""
        return min(1, units) if self._on_streams else units

    def _held_by_climb_bytes(self) -> int:
        """Payloads of a secondary rung that is not kept, from the first hop to the end of the second."""
        return 0 if self._policy.weights_in_step is Rung.SECONDARY else self._partitions * self._payload_bytes(self._weight_codes.intra)

    def _to_secondary_bytes(self) -> int:
        """What the hop over the inter link takes: the own payload, and the received ones if they change their code.

        Where differences are sent, the first climb sends the own slice as it is.
        """
        if self._partitions == 1:
            return 0
        received = 0 if self._weight_codes.are_alike else self._partitions
        first = self._payload_bytes(EXACT) if self._policy.sends_differences else 0
        return first + (1 + received) * self._payload_bytes(self._weight_codes.inter)

    def _to_full_bytes(self) -> int:
        return self._data_ranks * self._payload_bytes(self._weight_codes.intra) if self._partition_ranks > 1 else 0

    def _held_by_descent_bytes(self) -> int:
        """The gradient of the whole unit, or the secondary rung of the fp32 mean that climbs back, until the descent has landed."""
        if self._policy.gradients is not Rung.FULL:
            return self._sharding.element_bytes * self._full_numel()
        return self._partitions * self._mean_payload_bytes() if self._policy.optimizer is Rung.FULL else 0

    def _descent_bytes(self) -> int:
        """What the hops of a descent send and receive, and those in which an fp32 mean climbs back."""
        exchanged = 2 * self._data_ranks * self._payload_bytes(self._gradient_codes.intra) if self._partition_ranks > 1 else 0
        exchanged += 2 * self._partitions * self._payload_bytes(self._gradient_codes.inter) if self._partitions > 1 else 0
        if self._policy.optimizer is not Rung.FULL:
            return exchanged
        gathered = self._data_ranks * self._mean_payload_bytes() if self._partition_ranks > 1 else 0
        return exchanged + gathered + (self._mean_payload_bytes() if self._partitions > 1 else 0)

    def mean_bytes(self) -> int:
        """The fp32 values that a climb and a descent of this unit make at the same time, beside payloads and sums (comm/codecs.py)."""
        weights, gradients = self._weight_codes, self._gradient_codes
        if self._topology.is_one_rank:
            return 0
        if self._policy.sends_differences:
            is_on_host = self._is_offloaded and self._on_streams
            climbing = 0 if is_on_host else self._runs.blocks  # the difference from the kept copy
        else:
            climbing = 0 if weights.are_alike else self._recoded_numel(weights)
        descending = self._added_numel()
        if self._partitions > 1 and self._partition_ranks > 1 and self._policy.gradients is not Rung.SECONDARY:
            descending = max(descending, self._recoded_numel(gradients))
        return MAIN_BYTES * (climbing + descending)

    def _recoded_numel(self, codes: LinkCodes) -> int:
        """Values of a secondary rung between the codes of two links; if these have the same blocks, of its exact runs alone."""
        both_have_integers = not any(code.is_exact or code.levels is Levels.GAUSSIAN for code in (codes.inter, codes.intra))
        is_fused = both_have_integers and codes.inter.rotation is codes.intra.rotation
        return self._partitions * (self._runs.exact if is_fused else self._runs.numel)

    def _added_numel(self) -> int:
        """Values of a mean that is added to the sums of earlier micro-batches; kernels add those of blocks at once."""
        if self._policy.gradients is Rung.FULL:
            return 0
        is_secondary = self._policy.gradients is Rung.SECONDARY
        by_intra = is_secondary or self._partitions == 1
        if (self._partition_ranks if by_intra else self._partitions) == 1:
            return 0  # added as it is
        code = self._gradient_codes.intra if by_intra else self._gradient_codes.inter
        slices = self._partitions if is_secondary else 1
        return slices * (max(self._runs.blocks, self._runs.exact) if code.is_exact else self._runs.exact)

    def _mean_payload_bytes(self) -> int:
        """Of one slice of the fp32 mean, if the optimizer is kept on the full rung."""
        return self._sharding.mean_payload_bytes(self._runs)

    def _payload_bytes(self, code: Code) -> int:
        return self._sharding.payload_bytes(code, self._runs)

    def _full_numel(self) -> int:
        return self._data_ranks * self.slice_numel


def _gathered_bytes(uses: Sequence[Use], sharding: Sharding, numel_of: dict[str, int]) -> tuple[int, int]:
    """The most at any time, and in backward of all uses but the first and the last."""
    if sharding.policy.weights_in_step is Rung.FULL:
        return 0, 0
    largest = in_blocks = 0
    for schedule in (training_schedule(uses, sharding.prefetch), evaluation_schedule(uses, sharding.prefetch)):
        full: set[str] = set()
        for moment, actions in schedule.items():
            full = (full - set(actions.rest)) | set(actions.climb_to_full)
            numel = sum(numel_of[name] for name in full)
            largest = max(largest, numel)
            if moment.phase in (Phase.PRE_BACKWARD, Phase.RECOMPUTE) and 0 < moment.use < len(uses) - 1:
                in_blocks = max(in_blocks, numel)
    return sharding.element_bytes * largest, sharding.element_bytes * in_blocks


def largest_plan(
    unit_specs: Sequence[UnitSpec],
    uses: Sequence[Use],
    sharding: Sharding,
    topology: Topology,
    *,
    starts_exact: bool,
    on_streams: bool = False,
) -> MemoryPlan:
    """The plan of a run; if its first iterations are in full precision (`starts_exact`), the larger of the two plans."""
    plans = [plan_memory(unit_specs, uses, sharding, topology, on_streams=on_streams)]
    if starts_exact:
        exact = replace(sharding, policy=sharding.policy.in_full_precision())
        plans.append(plan_memory(unit_specs, uses, exact, topology, on_streams=on_streams))
    return max(plans, key=lambda plan: plan.states + plan.gathered + plan.buffers + plan.means + plan.host.total)
