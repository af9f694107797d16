"""AdamW over the main weights that this rank owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_zpp.zero.adam import AdamOptions, AdamParameters, make_adam
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.states import MOMENTS
from megatron_zpp.zero.unit import WeightUnit


class ShardedAdamW:
    """AdamW on views of the fp32 main weights, one view per unit and range of equal weight decay; units are updated one by one.

    Views begin at multiples of 32 elements, because blocks do, so every stage gets the same bits wherever its views end. At other places
    they would differ: torch's fused kernel rounds the last elements of a view differently if they do not fill one of its vectors.
    moments: for each unit, one tensor per name of MOMENTS, fp32 like its main weight; the optimizer's state tensors are views of them.
    """

    def __init__(self, units: Sequence[WeightUnit], gradients: Sequence[UnitGradient], options: AdamOptions) -> None:
        self.moments = [{name: torch.zeros_like(unit.main_weight) for name in MOMENTS} for unit in units]
        self._gradients = gradients
        self._adams = []
        for unit, gradient, moments in zip(units, gradients, self.moments, strict=True):
            states: dict[bool, dict[nn.Parameter, dict[str, Tensor]]] = {True: {}, False: {}}
            for span, decays in unit.layout.ranges_by(lambda segment: segment.spec.weight_decay, unit.first_slice, unit.slices):
                parameter = nn.Parameter(unit.main_weight[span.start : span.stop])
                parameter.grad = gradient.for_optimizer.range(span.start, span.stop)
                states[decays][parameter] = {name: moments[name][span.start : span.stop] for name in MOMENTS}
            has_any = states[True] or states[False]  # a slice may be all padding
            self._adams.append(make_adam(AdamParameters(decayed=states[True], others=states[False]), options) if has_any else None)

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        return next((adam.steps for adam in self._adams if adam is not None), 0)

    @steps.setter
    def steps(self, value: int) -> None:
        for adam in self._adams:
            if adam is not None:
                adam.steps = value

    def update(self, unit: int, learning_rate: float, weight_decay: float, gradient_factor: float) -> None:
        """Updates the unit with this index, after multiplying its gradient by `gradient_factor`, which unscales and clips it."""
        if gradient_factor != 1.0:
            for part in self._gradients[unit].for_optimizer.parts():
                part.mul_(gradient_factor)
        adam = self._adams[unit]
        if adam is not None:
            adam.update(learning_rate, weight_decay)

    def live_tensors(self) -> list[Tensor]:
        """The tensors that hold optimizer state."""
        return [tensor for moments in self.moments for tensor in moments.values()]
