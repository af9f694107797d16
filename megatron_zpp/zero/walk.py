"""One optimizer step as a sequence of computations, hops and waits, in the engine's own order, without tensors (no torch).

It follows zero/engine.py, unit.py and descents.py: the same schedule, the same rungs left fresh, as many descents under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.crossings import Crossing, UnitCrossings
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.memory_plan import Sharding
from megatron_zpp.zero.policy import Rung
from megatron_zpp.zero.schedule import LARGEST_UNDER_WAY, Actions, Moment, Phase, backward_starts, descent_order, training_schedule

Ticket = TypeVar("Ticket")


class Listener(Protocol[Ticket]):
    """Who is told of the step. A ticket stands for a hop and is never None."""

    def submit(self, crossing: Crossing, after: Ticket | None) -> Ticket:
        """A hop is handed to its lane; it may start when the one before it (`after`) has landed."""

    def wait(self, ticket: Ticket) -> None:
        """Computation goes on when this hop has landed."""

    def compute(self, use: int, *, is_backward: bool) -> None:
        """A use is computed."""


class _Unit(Generic[Ticket]):
    """Which rungs of one unit are fresh or on their way."""

    def __init__(self, crossings: UnitCrossings) -> None:
        self.climb_to_secondary, self.climb_to_full = crossings.climb()
        self.descend = crossings.descend()
        self.climb_of_mean = crossings.climb_of_mean()
        self.secondary: Ticket | None = None
        self.has_secondary = False
        self.full: Ticket | None = None
        self.has_full = False

    def invalidate(self) -> None:
        self.has_secondary = self.has_full = False
        self.secondary = self.full = None


class Walk(Generic[Ticket]):
    """The steps of one rank; `listener` hears of them."""

    def __init__(
        self, unit_specs: Sequence[UnitSpec], uses: Sequence[Use], sharding: Sharding, topology: Topology, listener: Listener[Ticket]
    ) -> None:
        self._policy = sharding.policy
        self._listener = listener
        self._units: dict[str, _Unit[Ticket]] = {}
        for spec in unit_specs:
            layout = FlatLayout(spec.params, topology.world_size, sharding.block_numel)
            self._units[spec.name] = _Unit(UnitCrossings(spec.name, layout, sharding, topology))
        self._schedule = training_schedule(uses, sharding.prefetch)
        self._starts_backward = backward_starts(uses)
        self._completed_by: list[list[str]] = [[] for _ in uses]
        first_use = {unit: index for index, use in reversed(list(enumerate(uses))) for unit in use.units}
        for unit in descent_order(uses):
            self._completed_by[first_use[unit]].append(unit)
        self._under_way: deque[list[Ticket]] = deque()

    def step(self, microbatches: int, *, submits_next_climbs: bool = False) -> None:
        """One optimizer step. submits_next_climbs: at its end, those that the next step begins with, as the engine does."""
        for index in range(microbatches):
            is_last = index == microbatches - 1
            for moment, actions in self._schedule.items():
                self._act(actions)
                self._compute(moment, is_last=is_last)
            if not is_last:
                self._submit_first_climbs()
        while self._under_way:
            self._finish(self._under_way.popleft())
        for unit in self._units.values():
            unit.invalidate()
        if submits_next_climbs:
            self._submit_first_climbs()

    def _act(self, actions: Actions) -> None:
        for name in actions.rest:
            self._rest(self._units[name])
        self._submit_climbs(actions)
        for name in actions.wait:
            self._wait(self._units[name])

    def _compute(self, moment: Moment, *, is_last: bool) -> None:
        if moment.phase is Phase.PRE_FORWARD:
            self._listener.compute(moment.use, is_backward=False)
        elif moment == self._starts_backward[moment.use]:
            self._listener.compute(moment.use, is_backward=True)
            for name in self._completed_by[moment.use]:
                self._descend(self._units[name], is_last=is_last)

    def _submit_first_climbs(self) -> None:
        self._submit_climbs(self._schedule[Moment(Phase.PRE_FORWARD, 0)])

    def _submit_climbs(self, actions: Actions) -> None:
        if self._policy.optimizer is Rung.FULL:
            return
        for name in actions.climb_to_full:
            unit = self._units[name]
            if not unit.has_full:
                self._climb_to_secondary(unit)
                unit.full = self._listener.submit(unit.climb_to_full, unit.secondary)
                unit.has_full = True
        for name in actions.climb_to_secondary:
            self._climb_to_secondary(self._units[name])

    def _climb_to_secondary(self, unit: _Unit[Ticket]) -> None:
        if not unit.has_secondary and not unit.has_full:
            unit.secondary = self._listener.submit(unit.climb_to_secondary, None)
            unit.has_secondary = True

    def _wait(self, unit: _Unit[Ticket]) -> None:
        if unit.full is not None:
            self._listener.wait(unit.full)
            unit.full = unit.secondary = None
            if self._policy.weights_in_step is not Rung.SECONDARY:
                unit.has_secondary = False

    def _rest(self, unit: _Unit[Ticket]) -> None:
        if unit.full is None and unit.secondary is None and self._policy.weights_in_step < Rung.FULL:
            unit.has_full = False

    def _descend(self, unit: _Unit[Ticket], *, is_last: bool) -> None:
        if self._policy.gradients is Rung.FULL and not is_last:
            return
        within, across = unit.descend
        tickets = [self._listener.submit(within, None)]
        if self._policy.gradients is not Rung.SECONDARY or is_last:
            tickets.append(self._listener.submit(across, tickets[-1]))
        if self._policy.optimizer is Rung.FULL:
            for crossing in unit.climb_of_mean:
                tickets.append(self._listener.submit(crossing, tickets[-1]))
        self._under_way.append(tickets)
        if len(self._under_way) > LARGEST_UNDER_WAY:
            self._finish(self._under_way.popleft())

    def _finish(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._listener.wait(ticket)
