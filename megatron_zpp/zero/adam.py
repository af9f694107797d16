"""AdamW over given parameters, by torch or by NVIDIA Apex. Both give the same update, up to rounding. The caller allocates the moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """An AdamW optimizer."""

    @property
    def steps(self) -> list[int]:
        """By group of parameters, its number of updates so far. The host waits for the device."""

    def update(self, learning_rate: float, weight_decay: float, skips: Tensor | None) -> None:
        """One step with the gradients that the parameters have.

        skips: [] fp32 on the device; 1 makes the step change nothing, not even `steps`, whatever the gradients are. None if the host knows
        that the step is not skipped.
        """


@dataclass(frozen=True)
class AdamGroup:
    """Parameters that are updated alike. Each has its moments exp_avg and exp_avg_sq, fp32 like the parameter.

    decays: whether their weights decay. steps: their number of updates so far, from which Adam corrects the bias of their moments.
    """

    decays: bool
    steps: int
    states: Mapping[nn.Parameter, dict[str, Tensor]]


def make_adam(groups: Sequence[AdamGroup], options: AdamOptions) -> Adam:
    """The AdamW that `options` ask for."""
    return ApexAdam(groups, options) if options.backend == "apex" else TorchAdam(groups, options)


class TorchAdam:
    """torch's fused AdamW. Its function is called directly: torch's class would import the compiler, a second and a half at every start."""

    def __init__(self, groups: Sequence[AdamGroup], options: AdamOptions) -> None:
        self._options = options
        self._lists = [_Lists.of(group) for group in groups]

    @property
    def steps(self) -> list[int]:
        return [int(lists.steps[0].item()) for lists in self._lists]

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
    """The parameters of a group and their states, in the same order. steps: number of updates of each, on its device."""

    parameters: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    decays: bool

    @classmethod
    def of(cls, group: AdamGroup) -> _Lists:
        exp_avgs, exp_avg_sqs = ([moments[name] for moments in group.states.values()] for name in ("exp_avg", "exp_avg_sq"))
        steps = [parameter.new_full((), group.steps) for parameter in group.states]
        return cls(list(group.states), exp_avgs, exp_avg_sqs, steps, group.decays)


class ApexAdam:
    """NVIDIA Apex's FusedAdam in its AdamW mode; each of its parameter groups counts the steps."""

    def __init__(self, groups: Sequence[AdamGroup], options: AdamOptions) -> None:
        fused_adam = apex_member("apex.optimizers", "FusedAdam")
        betas = (options.beta1, options.beta2)
        own = [{"params": list(group.states), "weight_decay": 0.0, "decays": group.decays, "step": group.steps} for group in groups]
        self._optimizer = fused_adam(own, lr=0.0, betas=betas, eps=options.eps, adam_w_mode=True)
        for group in groups:
            for parameter, moments in group.states.items():
                self._optimizer.state[parameter] = dict(moments)

    @property
    def steps(self) -> list[int]:
        return [int(group["step"]) for group in self._optimizer.param_groups]

    def update(self, learning_rate: float, weight_decay: float, skips: Tensor | None) -> None:
        if skips is not None:
            raise RuntimeError("Apex's FusedAdam cannot skip a step on the device; read the gradient norm before the update")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self._optimizer.step()
