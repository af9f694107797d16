"""What outer steps send between islands and how long a step waits for them, in closed form."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_zpp.comm.code import Code, SliceShape
from megatron_zpp.config.schema import Config
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.steps import MOST_UNDER_WAY
from megatron_zpp.outer.unit import outer_layout
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.plan.clock import StepTime
from megatron_zpp.training.plan.machine import Machine, Overlap
from megatron_zpp.training.setup import outer_options
from megatron_zpp.training.sharding import element_bytes, layouts_of, prefetch_of
from megatron_zpp.zero.layout import FlatLayout


@dataclass(frozen=True)
class OuterPlan:
    """The outer steps of a run, once means are no longer taken: until --diloco-start-iteration every step exchanges all units.

    numels: elements of each unit. node_bytes: into one node from other islands in one exchange of each unit; of the node with the most.
    ahead: how many units before its use a unit climbs. embeds_twice: whether the last product has the weights of the first unit.
    """

    options: OuterOptions
    islands: int
    numels: tuple[int, ...]
    node_bytes: tuple[int, ...]
    ahead: int
    embeds_twice: bool

    @cached_property
    def due(self) -> tuple[tuple[int, ...], ...]:
        """The units that are due together, by number, for each step of a period in which any are."""
        options = replace(self.options, start_iteration=0)
        steps = (options.is_due(self.numels, iteration) for iteration in range(1, options.period + 1))
        return tuple(tuple(unit for unit, is_due in enumerate(step) if is_due) for step in steps if any(step))

    @property
    def most_late(self) -> tuple[int, ...]:
        """Of the units that are due together, the last ones, which an overlap keeps under way; those with the most elements."""
        return max((units[-MOST_UNDER_WAY:] for units in self.due), key=lambda late: sum(self.numels[unit] for unit in late))

    @property
    def of_means(self) -> OuterPlan:
        """The same of the iterations after which all units take means."""
        return replace(self, options=replace(self.options, period=1, overlap_steps=0))

    @property
    def average_bytes(self) -> float:
        """Bytes that enter a node from other islands, per iteration."""
        return sum(self.node_bytes) / self.options.period

    @property
    def most_bytes(self) -> int:
        """Bytes that enter a node from other islands for one iteration, at most."""
        return max(sum(self.node_bytes[unit] for unit in units) for units in self.due)

    def added_to(self, step: StepTime, machine: Machine, microbatches: int) -> StepTime:
        """The time of an iteration of a period, on average, where `step` is that of an island alone.

        Assumptions, beside those of training/plan/clock.py:
        - Exchanges begin at the end of a step. They cross the link between nodes one after the other: bytes / rate, and a constant for each
          of their two collectives. The rounds of both, N - 1 of the gather and 1 of the exchange, take the latency of the link each.
        - MOST_UNDER_WAY exchanges begin at once, and each later one when the one that many places before it has ended, for which
          computation waits. The last ones hide behind the forward of the units before theirs, until their unit climbs, `ahead` of its use.
        - Forward is a third of the computation of one micro-batch, and a unit's share of it that of its elements. The look-up of the first
          unit takes no time.
        - With an overlap the last ones hide behind the whole next step.
        - Updates on the host that come early, because an exchange needs them, take no more time than in the next forward.
        - The codes take no time, and a step of islands of several nodes sends nothing over their link meanwhile.
        """
        exposed = sum(self._exposed(units, step, step.computing / microbatches / 3, machine) for units in self.due)
        period, exchanges = self.options.period, len(self.numels)
        return replace(
            step,
            seconds=step.seconds + exposed / period,
            inter_link=step.inter_link + self.average_bytes / machine.inter.bytes_per_second,
            latency=step.latency + exchanges * self._latency(machine) / period,
        )

    def _exposed(self, units: Sequence[int], step: StepTime, forward_seconds: float, machine: Machine) -> float:
        """Seconds for which computation waits for exchanges of units that are due together."""
        if self.islands == 1:
            return 0.0
        ends, free = list[float](), 0.0
        for index, unit in enumerate(units):
            ready = ends[index - MOST_UNDER_WAY] if index >= MOST_UNDER_WAY else 0.0
            free = max(ready, free) + self.node_bytes[unit] / machine.inter.bytes_per_second + 2 * machine.inter.seconds_per_collective
            ends.append(free + self._latency(machine))
        if machine.overlap is Overlap.NONE:
            return ends[-1]
        waited = max(ends[:-MOST_UNDER_WAY], default=0.0)
        for unit, end in list(zip(units, ends, strict=True))[-MOST_UNDER_WAY:]:
            hidden = step.seconds if self.options.overlap_steps else self._share_before(unit) * forward_seconds
            waited = max(waited, end - hidden)
        return waited

    def _latency(self, machine: Machine) -> float:
        """Seconds of all rounds of both collectives of an exchange."""
        return self.islands * machine.inter.latency_seconds if self.islands > 1 else 0.0

    def _share_before(self, unit: int) -> float:
        """The share of forward that comes before this unit climbs."""
        computed = sum(self.numels[1:]) + (self.numels[0] if self.embeds_twice else 0)
        return sum(self.numels[1 : max(1, unit - self.ahead)]) / computed


def outer_plan(config: Config, padded_vocab_size: int, grid: Grid) -> OuterPlan | None:
    """The outer steps of a resolved configuration; None without --diloco-sync-period. grid: of one island."""
    if not config.diloco.has_islands:
        return None
    options, islands, prefetch = outer_options(config), config.diloco.diloco_islands, prefetch_of(config.zero)
    codes = options.gradient_code, options.difference_code
    layouts, node_bytes = layouts_of(config, padded_vocab_size, grid), []
    for shapes in outer_shapes(layouts, islands):
        of_ranks = [
            sum(_payload_bytes(code, shape, config) for code in codes if shape is not None)
            for shape in (shapes[grid.ladder.slice_of(rank)] for rank in range(grid.data_ranks))
        ]
        per_node = grid.ladder.ranks_per_node
        of_nodes = [sum(of_ranks[first : first + per_node]) for first in range(0, grid.data_ranks, per_node)]
        node_bytes.append((islands - 1) * grid.tensor_ranks * max(of_nodes))
    return OuterPlan(
        options,
        islands,
        tuple(layout.numel for layout in layouts),
        tuple(node_bytes),
        max(prefetch.inter_uses, prefetch.intra_uses),
        embeds_twice=not config.model.untie_embeddings_and_output_weights,
    )


def _payload_bytes(code: Code, shape: SliceShape, config: Config) -> int:
    return code.payload_bytes(shape, element_bytes=element_bytes(config.precision), block_numel=config.zero.quantization_block_size)


def outer_shapes(layouts: Sequence[FlatLayout], islands: int) -> list[list[SliceShape | None]]:
    """For each unit and each of its slices the shape of a part of it, of which every island has one; None where a slice is all padding."""
    known: dict[Hashable, list[SliceShape | None]] = {}
    found = []
    for layout in layouts:
        # Most units are alike.
        key = layout.slices, layout.slice_shape, *((param.offset, param.numel) for param in layout.params)
        if key not in known:
            parts = [outer_layout(layout, own_slice, islands) for own_slice in range(layout.slices)]
            known[key] = [None if part is None else part.slice_shape for part in parts]
        found.append(known[key])
    return found
