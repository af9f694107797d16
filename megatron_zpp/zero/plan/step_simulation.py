"""Simulates one optimizer step: its computations, hops and waits in the engine's order, without tensors (no torch).

It runs the engine's own schedule, residency and descents. It counts one encoding for every climb, although the engine may encode a payload
once and use it for several climbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from megatron_zpp.comm.code import Runs
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.descents import Descents
from megatron_zpp.zero.later_updates import LaterUpdates
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.plan.memory_plan import Sharding
from megatron_zpp.zero.plan.planned_hops import PlannedHop, UnitHops
from megatron_zpp.zero.policy import Policy, Rung
from megatron_zpp.zero.residency import Residency
from megatron_zpp.zero.schedule import Actions, Moment, Phase, backward_starts, descent_order, training_schedule
from megatron_zpp.zero.update_groups import coming_with, update_groups

Ticket = TypeVar("Ticket")
SIMULATED_MICROBATCHES = 3  # of a step with more: a first one, one like all between, and a last one


class Listener(Protocol[Ticket]):
    """Receives the events of the simulated step. A ticket stands for a hop and is never None."""

    def submit(self, hop: PlannedHop, after: Ticket | None) -> Ticket:
        """A hop is submitted to its lane; it may start once the hop `after` has landed."""

    def wait(self, ticket: Ticket) -> None:
        """Computation waits until this hop has landed."""

    def compute(self, use: int, *, is_backward: bool) -> None:
        """A use is computed."""

    def read_norm(self) -> None:
        """The host waits until the device has the gradient norm."""

    def update_on_host(self, numel: int, coming: Sequence[int]) -> None:
        """The host updates the elements of a unit that this rank owns. coming: those of units whose gradients start to come down now."""


class _Weights(Generic[Ticket]):
    """Takes the place of zero/unit.py:WeightUnit: reports its hops, without tensors."""

    def __init__(self, name: str, hops: UnitHops, policy: Policy, topology: Topology, listener: Listener[Ticket]) -> None:
        to_secondary, to_full = (hop.of_unit(name) for hop in hops.climb)
        self._hop_to = {Rung.SECONDARY: to_secondary, Rung.FULL: to_full}
        self._first_to_secondary = hops.first_climb[0].of_unit(name) if policy.optimizer is Rung.HOST else to_secondary
        self._policy = policy
        self._listener = listener
        self._residency: Residency[Ticket] = Residency(policy, topology)

    def climb(self, rung: Rung) -> None:
        for missing in self._residency.needs(rung):
            if self._residency.fills_without_hops:
                self._residency.filled(missing)
            else:
                is_first = missing is Rung.SECONDARY and not self._residency.is_fresh(Rung.PRIMARY)
                hop = self._first_to_secondary if is_first else self._hop_to[missing]
                self._residency.submitted(missing, self._listener.submit(hop, self._residency.ticket_below(missing)))
                self._residency.filled(Rung.PRIMARY)

    def wait(self) -> None:
        if not self._residency.is_fresh(Rung.FULL):
            self._listener.wait(self._residency.under_way()[Rung.FULL])
            self._residency.landed()

    def rest(self) -> None:
        self._residency.rest()

    def invalidate(self) -> None:
        for ticket in self._residency.under_way().values():
            self._listener.wait(ticket)
        self._residency.invalidate()


class _Gradient(Generic[Ticket]):
    """Takes the place of zero/unit_descent.py:UnitDescent: reports its hops, without tensors."""

    def __init__(self, name: str, hops: UnitHops, policy: Policy, topology: Topology, listener: Listener[Ticket]) -> None:
        self._within, self._across = (hop.of_unit(name) for hop in hops.descend)
        self._climb_of_mean = [hop.of_unit(name) for hop in hops.climb_of_mean] if policy.optimizer is Rung.FULL else []
        self._policy = policy
        self._is_one_rank = topology.is_one_rank
        self._listener = listener
        self._tickets: list[Ticket] = []

    def fill_missing(self) -> None:
        pass

    def descend(self, *, is_last_microbatch: bool) -> None:
        self.finish()
        if self._is_one_rank or (self._policy.gradients is Rung.FULL and not is_last_microbatch):
            return
        self._submit(self._within)
        if self._policy.gradients is not Rung.SECONDARY or is_last_microbatch:
            self._submit(self._across)
        for hop in self._climb_of_mean:
            self._submit(hop)

    def finish(self) -> None:
        for ticket in self._tickets:
            self._listener.wait(ticket)
        self._tickets = []

    def _submit(self, hop: PlannedHop) -> None:
        self._tickets.append(self._listener.submit(hop, self._tickets[-1] if self._tickets else None))


class StepSimulation(Generic[Ticket]):
    """The steps of one rank, reported to `listener`."""

    def __init__(
        self, unit_specs: Sequence[UnitSpec], uses: Sequence[Use], sharding: Sharding, grid: Grid, listener: Listener[Ticket]
    ) -> None:
        self._listener = listener
        self._weights: dict[str, _Weights[Ticket]] = {}
        gradients: dict[str, _Gradient[Ticket]] = {}
        slice_numels: dict[str, int] = {}
        policy = sharding.policy.in_world(grid.ladder)
        alike: dict[Runs, UnitHops] = {}  # such as all blocks
        for spec in unit_specs:
            layout = FlatLayout(spec.params, grid.data_ranks, sharding.block_numel)
            slice_numels[spec.name] = layout.slice_numel
            hops = alike.setdefault(layout.runs, UnitHops(layout, sharding, grid))
            self._weights[spec.name] = _Weights(spec.name, hops, policy, grid.ladder, listener)
            gradients[spec.name] = _Gradient(spec.name, hops, policy, grid.ladder, listener)
        self._schedule = training_schedule(uses, sharding.prefetch)
        self._first_actions = self._schedule[Moment(Phase.PRE_FORWARD, 0)]
        names = list(slice_numels)
        in_order = [names[index] for (index,) in update_groups(names, self._schedule.values(), at_once=False)]
        self._updated_numels = [slice_numels[name] for name in in_order]
        self._later = LaterUpdates([[name] for name in in_order])
        self._updates_on_host = policy.optimizer is Rung.HOST
        self._starts_backward = backward_starts(uses)
        order = descent_order(uses)
        self._descents = Descents(order, gradients)
        self._completed_by: list[list[str]] = [[] for _ in uses]
        first_use = {unit: index for index, use in reversed(list(enumerate(uses))) for unit in use.units}
        for unit in order:
            self._completed_by[first_use[unit]].append(unit)

    def step(self, microbatches: int, *, submits_next_climbs: bool = False) -> None:
        """One optimizer step. submits_next_climbs: whether it also submits the first climbs of the next step, as the engine does."""
        for index in range(microbatches):
            is_last = index == microbatches - 1
            for moment, actions in self._schedule.items():
                self._act(actions)
                self._compute(moment, is_last=is_last)
            self._descents.sweep(is_last_microbatch=is_last)
            if not is_last:
                self._submit_climbs(self._first_actions)
        self._descents.finish()
        for unit in self._weights.values():
            unit.invalidate()
        self._listener.read_norm()
        if self._updates_on_host:
            self._later.begin(self._update_on_host)
        if submits_next_climbs:
            self._submit_climbs(self._first_actions)

    def _update_on_host(self, unit: int) -> None:
        self._listener.update_on_host(self._updated_numels[unit], coming_with(unit, self._updated_numels))

    def _act(self, actions: Actions) -> None:
        for name in actions.rest:
            self._weights[name].rest()
        self._submit_climbs(actions)
        for name in actions.wait:
            self._weights[name].wait()

    def _compute(self, moment: Moment, *, is_last: bool) -> None:
        if moment.phase is Phase.PRE_FORWARD:
            self._listener.compute(moment.use, is_backward=False)
        elif moment == self._starts_backward[moment.use]:
            self._listener.compute(moment.use, is_backward=True)
            for name in self._completed_by[moment.use]:
                self._descents.complete(name, is_last_microbatch=is_last)

    def _submit_climbs(self, actions: Actions) -> None:
        for name in actions.climb_to_full:
            self._climb(name, Rung.FULL)
        for name in actions.climb_to_secondary:
            self._climb(name, Rung.SECONDARY)

    def _climb(self, name: str, rung: Rung) -> None:
        self._later.reach(name)
        self._weights[name].climb(rung)
