"""AdamW over the main weights that this rank owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_zpp.zero.adam import Adam, AdamOptions, AdamParameters, make_adam
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.states import MOMENTS
from megatron_zpp.zero.unit import WeightUnit

_VIEW_NUMEL = 32  # elements; views begin at multiples of it


@dataclass(frozen=True)
class Update:
    """One step of AdamW. factor: of the gradients, a number or [] fp32; it unscales and clips them. skips: see Adam.update."""

    learning_rate: float
    weight_decay: float
    factor: float | Tensor = 1.0
    skips: Tensor | None = None


class ShardedAdamW:
    """AdamW on views of the fp32 main weights, one view per unit and range of equal weight decay; one call updates a group of units.

    Views begin at multiples of 32 elements, because blocks do, so every stage gets the same bits wherever its views end. At other places
    they would differ: torch's fused kernels round the last elements of a view differently if they do not fill one of their vectors.
    moments: for each unit, one tensor per name of MOMENTS, fp32 like its main weight; the optimizer's state tensors are views of them.
    """

    def __init__(
        self,
        units: Sequence[WeightUnit],
        gradients: Sequence[UnitGradient],
        groups: Sequence[Sequence[int]],
        options: AdamOptions,
    ) -> None:
        """groups: indices of the units that are updated together; each unit is in one group."""
        self.moments = [{name: torch.zeros_like(unit.main_weight) for name in MOMENTS} for unit in units]
        of_units = [_parameters(*parts) for parts in zip(units, gradients, self.moments, strict=True)]
        self._groups = [_Group([of_units[index] for index in group], [gradients[index] for index in group], options) for group in groups]

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
        """Updates the units of this group. Their gradients are changed, and NaN if the step is skipped."""
        self._groups[group].update(update)

    def live_tensors(self) -> list[Tensor]:
        """The tensors that hold optimizer state."""
        return [tensor for moments in self.moments for tensor in moments.values()]


class _Group:
    """Units that are updated together. adam: None if this rank's slices of them are all padding."""

    def __init__(self, of_units: Sequence[AdamParameters], gradients: Sequence[UnitGradient], options: AdamOptions) -> None:
        parameters = AdamParameters(
            decayed={key: state for unit in of_units for key, state in unit.decayed.items()},
            others={key: state for unit in of_units for key, state in unit.others.items()},
        )
        self.adam: Adam | None = make_adam(parameters, options) if parameters.states() else None
        self._gradients = [part for gradient in gradients for part in gradient.for_optimizer.parts()]

    def update(self, update: Update) -> None:
        if isinstance(update.factor, Tensor) or update.factor != 1.0:
            torch._foreach_mul_(self._gradients, update.factor)
        if self.adam is not None:
            self.adam.update(update.learning_rate, update.weight_decay, update.skips)


def _parameters(unit: WeightUnit, gradient: UnitGradient, moments: Mapping[str, Tensor]) -> AdamParameters:
    states: dict[bool, dict[nn.Parameter, dict[str, Tensor]]] = {True: {}, False: {}}
    for span, decays in unit.layout.ranges_by(lambda segment: segment.spec.weight_decay, unit.first_slice, unit.slices):
        if span.start % _VIEW_NUMEL:
            raise ValueError(
                f"unit {unit.name}: weight decay changes at element {span.start} of the slice, and AdamW's views begin at multiples of "
                f"{_VIEW_NUMEL}; parameters of one dimension need the same weight decay, and blocks a multiple of {_VIEW_NUMEL} elements"
            )
        parameter = nn.Parameter(unit.main_weight[span.start : span.stop])
        parameter.grad = gradient.for_optimizer.range(span.start, span.stop)
        states[decays][parameter] = {name: moments[name][span.start : span.stop] for name in MOMENTS}
    return AdamParameters(decayed=states[True], others=states[False])
