"""AdamW over the main weights that this rank owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.comm.host_link import Arrival, HostLink
from megatron_zpp.zero.adam import Adam, AdamOptions, AdamParameters, make_adam
from megatron_zpp.zero.adam_views import adam_views
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.states import MOMENTS
from megatron_zpp.zero.unit import WeightUnit
from megatron_zpp.zero.update import Update
from megatron_zpp.zero.update_groups import coming_with, update_order


class ShardedAdamW:
    """AdamW on views of the fp32 main weights (zero/adam_views.py); one call updates a group of units.

    Gradients come to where these are kept over `link`, those of the next group while one is updated.
    moments: for each unit, one tensor per name of MOMENTS, fp32 like its main weight; the optimizer's state tensors are views of them.
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
        self.moments = [{name: torch.zeros_like(unit.main_weight) for name in MOMENTS} for unit in units]
        order = update_order(groups)
        arrivals = dict(zip(order, link.arrivals([gradients[index].for_optimizer for index in order]), strict=True))
        views = {index: adam_views(units[index], arrivals[index].values, self.moments[index]) for index in order}
        self._groups = [_Group([views[index] for index in group], [arrivals[index] for index in group], options) for group in groups]

    @property
    def steps(self) -> int:
        """Number of updates so far; the host waits for the device."""
        return next((group.adam.steps for group in self._groups if group.adam is not None), 0)

    @steps.setter
    def steps(self, value: int) -> None:
        for group in self._groups:
            if group.adam is not None:
                group.adam.steps = value

    def update(self, group: int, update: Update) -> None:
        """Updates the units of this group; call it for group after group. Gradients are changed, and NaN if the step is skipped."""
        for coming in coming_with(group, self._groups):
            coming.start()
        self._groups[group].update(update)

    def live_tensors(self) -> list[Tensor]:
        """The tensors that hold optimizer state."""
        return [tensor for moments in self.moments for tensor in moments.values()]


class _Group:
    """Units that are updated together. adam: None if this rank's slices of them are all padding."""

    def __init__(self, of_units: Sequence[AdamParameters], arrivals: Sequence[Arrival], options: AdamOptions) -> None:
        parameters = AdamParameters(
            decayed={key: state for unit in of_units for key, state in unit.decayed.items()},
            others={key: state for unit in of_units for key, state in unit.others.items()},
        )
        self.adam: Adam | None = make_adam(parameters, options) if parameters.states() else None
        self._arrivals = arrivals
        self._gradients = [part for arrival in arrivals for part in arrival.values.parts()]

    def start(self) -> None:
        """Sends the gradients on their way."""
        for arrival in self._arrivals:
            arrival.start()

    def update(self, update: Update) -> None:
        for arrival in self._arrivals:
            arrival.wait()
        if isinstance(update.factor, Tensor) or update.factor != 1.0:
            torch._foreach_mul_(self._gradients, update.factor)
        if self.adam is not None:
            self.adam.update(update.learning_rate, update.weight_decay, update.skips)
