"""Predicts the bytes of one optimizer step, from units, policy and world alone (no torch). The ledger of a run counts the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zpp.comm.ledger import Traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.parallel.topology import Direction, Link
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.plan.memory_plan import Sharding
from megatron_zpp.zero.plan.planned_hops import PlannedHop, UnitHops
from megatron_zpp.zero.plan.step_simulation import SIMULATED_MICROBATCHES, StepSimulation
from megatron_zpp.zero.policy import Rung


@dataclass
class PlannedTraffic:
    """The bytes that one rank receives in one step. collectives: number of hops over links of more than one rank."""

    weights: Traffic = Traffic()
    gradients: Traffic = Traffic()
    collectives: int = 0

    @property
    def total(self) -> Traffic:
        return self.weights + self.gradients

    def repeating_last(self, times: int, before: PlannedTraffic) -> PlannedTraffic:
        """This traffic, and again `times` what it has more than `before`."""
        return PlannedTraffic(
            self.weights + (self.weights - before.weights) * times,
            self.gradients + (self.gradients - before.gradients) * times,
            self.collectives + (self.collectives - before.collectives) * times,
        )

    # ---- the listener of a simulation

    def submit(self, hop: PlannedHop, after: int | None) -> int:
        if hop.traffic != Traffic():
            self.collectives += 1
        if hop.lane.direction is Direction.CLIMB:
            self.weights += hop.traffic
        else:
            self.gradients += hop.traffic
        return self.collectives

    def wait(self, ticket: int) -> None:
        return None

    def compute(self, use: int, *, is_backward: bool) -> None:
        return None

    def read_norm(self) -> None:
        return None

    def update_on_host(self, numel: int, coming: Sequence[int]) -> None:
        return None


def planned_traffic(
    unit_specs: Sequence[UnitSpec], uses: Sequence[Use], sharding: Sharding, grid: Grid, microbatches: int
) -> PlannedTraffic:
    """The traffic of a step of `microbatches`, which is the same on every rank. In stage 0 the climb of the mean counts as gradients.

    Only few of them are simulated: all between the first and the last move the same.
    """

    def of_step(microbatches: int) -> PlannedTraffic:
        traffic = PlannedTraffic()
        StepSimulation(unit_specs, uses, sharding, grid, traffic).step(microbatches)
        return traffic

    simulated = min(microbatches, SIMULATED_MICROBATCHES)
    traffic = of_step(simulated)
    if simulated < microbatches:
        traffic = traffic.repeating_last(microbatches - simulated, of_step(simulated - 1))
    if sharding.policy.optimizer is Rung.FULL:
        traffic.weights, traffic.gradients = Traffic(), traffic.total
    return traffic


def smallest_inter_hop_bytes(unit_specs: Sequence[UnitSpec], sharding: Sharding, grid: Grid, least_share: float) -> int:
    """Bytes that the smallest hop over the inter link brings into one node.

    least_share: units with a smaller share of all parameters are left out.
    """
    layouts = [FlatLayout(spec.params, grid.data_ranks, sharding.block_numel) for spec in unit_specs]
    whole = sum(layout.numel for layout in layouts)
    hops = []
    for layout in layouts:
        if layout.numel >= least_share * whole:
            of_unit = UnitHops(layout, sharding, grid)
            hops += [hop for hop in (*of_unit.climb, *of_unit.descend) if hop.lane.link is Link.INTER]
    return grid.into_node(min(hop.traffic.inter_bytes for hop in hops))
