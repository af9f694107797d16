"""AdamW over the main weights that this rank owns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_zpp.comm.host_link import Arrival, HostLink
from megatron_zpp.zero.adam import Adam, AdamGroup, AdamOptions, make_adam
from megatron_zpp.zero.adam_views import AdamView, adam_views
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.states import MOMENTS
from megatron_zpp.zero.unit import WeightUnit
from megatron_zpp.zero.update import Update
from megatron_zpp.zero.update_groups import coming_with, update_order


class ShardedAdamW:
    """AdamW on views of the fp32 main weights (zero/adam_views.py); one call updates a group of units.

    Gradients come to where these are kept over `link`, those of the next group while one is updated.
    moments: for each unit, one tensor per name of MOMENTS, fp32 like its main weight; the optimizer's state tensors are views of them.
    steps: number of updates so far. unused_steps: by parameter, how many of them have passed it over because it was unused. The caller
    counts them, because only it knows which updates are skipped.
    """

    def __init__(
        self,
        units: Sequence[WeightUnit],
        gradients: Sequence[UnitGradient],
        groups: Sequence[Sequence[int]],
        options: AdamOptions,
        link: HostLink,
    ) -> None:
        """groups: indices of the units that are updated together; each unit is in one group."""
        self.steps = 0
        self.unused_steps: dict[str, int] = {}
        self.moments = [{name: torch.zeros_like(unit.main_weight) for name in MOMENTS} for unit in units]
        order = update_order(groups)
        arrivals = dict(zip(order, link.arrivals([gradients[index].for_optimizer for index in order]), strict=True))
        self._groups = [_Group([_Part(units[index], arrivals[index], self.moments[index]) for index in group], options) for group in groups]

    def count(self, unused: Iterable[str]) -> None:
        """Counts an update of all groups which passes `unused` over."""
        self.steps += 1
        for name in unused:
            self.unused_steps[name] = self.unused_steps.get(name, 0) + 1

    def resume(self, steps: int, unused_steps: Mapping[str, int]) -> None:
        """Sets the number of updates so far, and how many of them have passed each parameter over."""
        self.steps, self.unused_steps = steps, dict(unused_steps)
        for group in self._groups:
            group.resume(steps, unused_steps)

    def update(self, group: int, update: Update) -> None:
        """Updates the units of this group; call it for group after group. Gradients are changed, and NaN if the step is skipped."""
        for coming in coming_with(group, self._groups):
            coming.start()
        self._groups[group].update(update)

    def live_tensors(self) -> list[Tensor]:
        """The tensors that hold optimizer state."""
        return [tensor for moments in self.moments for tensor in moments.values()]


@dataclass(frozen=True)
class _Part:
    """What AdamW reads and writes of one unit."""

    unit: WeightUnit
    arrival: Arrival
    moments: Mapping[str, Tensor]


class _Group:
    """Units that are updated together. adam: None if this rank has nothing of them to update."""

    def __init__(self, parts: Sequence[_Part], options: AdamOptions) -> None:
        self._parts = parts
        self._options = options
        self._names = frozenset(placed.spec.name for part in parts for placed in part.unit.layout.params)
        self._gradients = [piece for part in parts for piece in part.arrival.values.parts()]
        self.adam: Adam | None
        self.resume(0, {})

    def resume(self, steps: int, unused_steps: Mapping[str, int]) -> None:
        """Begins after `steps` updates, some of which have passed parameters over."""
        self._make_adam({name: steps - unused_steps.get(name, 0) for name in self._names}, frozenset())

    def _make_adam(self, steps: dict[str, int], unused: frozenset[str]) -> None:
        """Makes an optimizer that passes `unused` over. steps: by parameter, its number of updates so far."""
        self._first_steps, self._unused = steps, unused
        self._views: list[AdamView] = []
        alike: dict[tuple[bool, int], dict[nn.Parameter, dict[str, Tensor]]] = {}
        used = {name: updates for name, updates in steps.items() if name not in unused}
        for part in self._parts:
            for view in adam_views(part.unit, part.arrival.values, part.moments, used):
                alike.setdefault((view.decays, view.steps), {})[view.parameter] = view.moments
                self._views.append(view)
        groups = [AdamGroup(decays, updates, states) for (decays, updates), states in alike.items()]
        self.adam = make_adam(groups, self._options) if groups else None
        self._first = groups[0].steps if groups else 0

    def _steps(self) -> dict[str, int]:
        """By parameter of which this rank has elements, its number of updates so far. The host waits for the device."""
        made = self.adam.steps[0] - self._first if self.adam is not None else 0
        return {name: steps + (made if name not in self._unused else 0) for name, steps in self._first_steps.items()}

    def start(self) -> None:
        """Sends the gradients on their way."""
        for part in self._parts:
            part.arrival.start()

    def update(self, update: Update) -> None:
        unused = update.unused & self._names
        if unused != self._unused:
            self._make_adam(self._steps(), unused)
        for part in self._parts:
            part.arrival.wait()
        if isinstance(update.factor, Tensor) or update.factor != 1.0:
            torch._foreach_mul_(self._gradients, update.factor)
        for view in self._views:
            view.before_update()
        if self.adam is not None:
            self.adam.update(update.learning_rate, update.weight_decay, update.skips)
        for view in self._views:
            view.after_update()
