"""AdamW over given parameters, by torch or by NVIDIA Apex. Both give the same update, up to rounding. The caller allocates the moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from megatron_zpp.ops.apex import apex_member


@dataclass(frozen=True)
class AdamOptions:
    """Hyper-parameters of AdamW. weight_decay: of every step that is not given another. backend: torch or apex."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    backend: str = "torch"

    @property
    def skips_on_device(self) -> bool:
        """Whether an update can be enqueued before the host knows that it is not skipped. Apex counts its steps on the host."""
        return self.backend == "torch"


class Adam(Protocol):
    """An AdamW optimizer. steps: number of updates so far; a resumed run sets it."""

    steps: int

    def update(self, learning_rate: float, weight_decay: float, skips: Tensor | None) -> None:
        """One step with the gradients that the parameters have.

        skips: [] fp32 on the device; 1 makes the step change nothing, not even `steps`, whatever the gradients are. None if the host knows
        that the step is not skipped.
        """


@dataclass(frozen=True)
class AdamParameters:
    """The parameters to update, with and without weight decay. Each has its moments exp_avg and exp_avg_sq, fp32 like the parameter."""

    decayed: Mapping[nn.Parameter, dict[str, Tensor]]
    others: Mapping[nn.Parameter, dict[str, Tensor]]

    def states(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        return {**self.decayed, **self.others}

    def groups(self) -> list[tuple[Mapping[nn.Parameter, dict[str, Tensor]], bool]]:
        """Parameters with their moments, and whether their weights decay; a group without parameters is left out."""
        return [(states, decays) for states, decays in ((self.decayed, True), (self.others, False)) if states]


def make_adam(parameters: AdamParameters, options: AdamOptions) -> Adam:
    """The AdamW that `options` ask for."""
    return ApexAdam(parameters, options) if options.backend == "apex" else TorchAdam(parameters, options)


class TorchAdam:
    """torch's fused AdamW. Its function is called directly: torch's class would import the compiler, a second and a half at every start."""

    def __init__(self, parameters: AdamParameters, options: AdamOptions) -> None:
        self._options = options
        self._lists = [_Lists.of(states, decays) for states, decays in parameters.groups()]

    @property
    def steps(self) -> int:
        return int(self._lists[0].steps[0].item())

    @steps.setter
    def steps(self, value: int) -> None:
        for lists in self._lists:
            for step in lists.steps:
                step.fill_(value)

    @torch.no_grad()
    def update(self, learning_rate: float, weight_decay: float, skips: Tensor | None) -> None:
        for lists in self._lists:
            adamw(
                lists.parameters,
                [cast(Tensor, parameter.grad) for parameter in lists.parameters],
                lists.exp_avgs,
                lists.exp_avg_sqs,
                [],
                lists.steps,
                fused=True,
                found_inf=skips,  # as torch's GradScaler gives it to fused optimizers
                amsgrad=False,
                beta1=self._options.beta1,
                beta2=self._options.beta2,
                lr=learning_rate,
                weight_decay=weight_decay if lists.decays else 0.0,
                eps=self._options.eps,
                maximize=False,
            )


@dataclass(frozen=True)
class _Lists:
    """Parameters with the same weight decay and their states, in the same order. steps: number of updates of each, on its device."""

    parameters: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    decays: bool

    @classmethod
    def of(cls, states: Mapping[nn.Parameter, dict[str, Tensor]], decays: bool) -> _Lists:
        exp_avgs, exp_avg_sqs = ([moments[name] for moments in states.values()] for name in ("exp_avg", "exp_avg_sq"))
        return cls(list(states), exp_avgs, exp_avg_sqs, [parameter.new_zeros(()) for parameter in states], decays)


class ApexAdam:
    """NVIDIA Apex's FusedAdam in its AdamW mode; each of its parameter groups counts the steps."""

    def __init__(self, parameters: AdamParameters, options: AdamOptions) -> None:
        fused_adam = apex_member("apex.optimizers", "FusedAdam")
        betas = (options.beta1, options.beta2)
        groups = [{"params": list(states), "weight_decay": 0.0, "decays": decays} for states, decays in parameters.groups()]
        self._optimizer = fused_adam(groups, lr=0.0, betas=betas, eps=options.eps, adam_w_mode=True)
        for parameter, moments in parameters.states().items():
            self._optimizer.state[parameter] = dict(moments)

    @property
    def steps(self) -> int:
        return int(self._optimizer.param_groups[0].get("step", 0))

    @steps.setter
    def steps(self, value: int) -> None:
        for group in self._optimizer.param_groups:
            group["step"] = value

    def update(self, learning_rate: float, weight_decay: float, skips: Tensor | None) -> None:
        if skips is not None:
            raise RuntimeError("Apex's FusedAdam cannot skip a step on the device; read the gradient norm before the update")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self._optimizer.step()
