"""AdamW over the main weights that this rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.unit import WeightUnit

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamOptions:
    """Hyper-parameters of AdamW that stay fixed over a run."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


class ShardedAdamW:
    """torch's fused AdamW on views of the fp32 main weights, one view per unit and range of equal weight decay.

    The bits do not depend on how weights are cut into views as long as every cut is at a multiple of 32 elements, which quantization blocks
    see to: the fused kernel rounds otherwise in the rest of a view that does not fill its vectors.
    moments: per unit and name of MOMENTS, fp32 like the unit's main weight; the optimizer's state tensors are views of them.
    """

    def __init__(self, units: Sequence[WeightUnit], gradients: Sequence[UnitGradient], options: AdamOptions) -> None:
        self.moments = [{name: torch.zeros_like(unit.main_weight) for name in MOMENTS} for unit in units]
        self._gradients = gradients
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        for unit, gradient, moments in zip(units, gradients, self.moments, strict=True):
            for span, decays in unit.layout.ranges_by(lambda segment: segment.spec.weight_decay, unit.first_slice, unit.slices):
                parameter = nn.Parameter(unit.main_weight[span.start : span.stop])
                parameter.grad = gradient.for_optimizer.range(span.start, span.stop)
                groups[decays].append(parameter)
                states[parameter] = {name: moments[name][span.start : span.stop] for name in MOMENTS}
        self._optimizer = torch.optim.AdamW(
            [{"params": groups[True], "weight_decay": options.weight_decay}, {"params": groups[False], "weight_decay": 0.0}],
            lr=0.0,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            fused=True,
        )
        self._steps = [torch.zeros((), dtype=torch.float32, device=parameter.device) for parameter in states]
        for (parameter, state), step in zip(states.items(), self._steps, strict=True):
            self._optimizer.state[parameter] = {"step": step, **state}

    @property
    def steps(self) -> int:
        """How many updates have been made."""
        return int(self._steps[0].item())

    @steps.setter
    def steps(self, value: int) -> None:
        for step in self._steps:
            step.fill_(value)

    def step(self, learning_rate: float, gradient_factor: float) -> None:
        """One update with the gradients times `gradient_factor` (unscaling and clipping in one)."""
        if gradient_factor != 1.0:
            for gradient in self._gradients:
                for part in gradient.for_optimizer.parts():
                    part.mul_(gradient_factor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def live_tensors(self) -> list[Tensor]:
        """The tensors that hold optimizer state."""
        return [tensor for moments in self.moments for tensor in moments.values()]
