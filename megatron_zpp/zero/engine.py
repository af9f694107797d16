"""The ZeRO engine: shards a model's units, brings their weights when a use needs them, and takes their gradients away.

It reads one row of the policy table and one schedule; nothing in it asks which member of the family is running.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.links import Ladder, LinkCodecs
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.zero.grad_norm import global_norm
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.hooks import hook_parameters, hook_uses
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.loss_scaler import ConstantLossScaler, LossScaler
from megatron_zpp.zero.optimizer import AdamOptions, ShardedAdamW
from megatron_zpp.zero.policy import Policy
from megatron_zpp.zero.schedule import (
    Moment,
    Phase,
    Prefetch,
    descent_order,
    evaluation_schedule,
    training_schedule,
)
from megatron_zpp.zero.unit import WeightUnit

_DESCENTS_UNDER_WAY = 2
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class EngineOptions:
    """What the engine is to do beside the policy.

    dtype: of the working weights and their gradients. clip_grad: largest global gradient norm, 0 for no clipping.
    """

    policy: Policy
    weight_codecs: LinkCodecs
    gradient_codecs: LinkCodecs
    dtype: torch.dtype = torch.float32
    block_numel: int = 256
    prefetch: Prefetch = Prefetch()
    adam: AdamOptions = AdamOptions()
    clip_grad: float = 1.0


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step came to: the gradient norm before clipping, and whether the step was skipped for a NaN or inf in it."""

    grad_norm: float
    is_skipped: bool


@dataclass
class _Descents:
    """Units whose gradients are complete, in the static order in which every rank lets them descend."""

    order: tuple[str, ...]
    complete: set[str] = field(default_factory=set)
    submitted: int = 0


class ZeroEngine:
    """One rank's part of a sharded model.

    module: built on the meta device; each of its parameters is replaced by a leaf that a unit owns.
    Every rank must make the same calls in the same order.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_specs: Sequence[UnitSpec],
        uses: Sequence[Use],
        options: EngineOptions,
        ladder: Ladder,
        device: torch.device,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        self.module = module
        self.ladder = ladder
        self.device = device
        self.loss_scaler = loss_scaler or ConstantLossScaler()
        self._options = options
        self._policy = options.policy
        self._schedules = {True: training_schedule(uses, options.prefetch), False: evaluation_schedule(uses, options.prefetch)}
        self.units: list[WeightUnit] = []
        self.gradients: list[UnitGradient] = []
        like = torch.empty(0, dtype=options.dtype, device=device)
        for spec in unit_specs:
            self._add_unit(spec, like)
        self._unit_of = {unit.name: unit for unit in self.units}
        self._gradient_of = {gradient.name: gradient for gradient in self.gradients}
        self.optimizer = ShardedAdamW(self.units, self.gradients, options.adam)
        self._descents = _Descents(descent_order(uses))
        self._under_way: deque[UnitGradient] = deque()
        self._is_in_backward = False
        self._is_last_microbatch = True
        hook_uses(module, uses, self)

    def _add_unit(self, spec: UnitSpec, like: Tensor) -> None:
        layout = FlatLayout(spec.params, self.ladder.topology.world_size, self._options.block_numel)
        unit = WeightUnit(spec, layout, self._policy, self.ladder, self._options.weight_codecs, like)
        gradient = UnitGradient(spec.name, layout, self._policy, self.ladder, self._options.gradient_codecs, like)
        for parameter, placed in zip(unit.parameters, layout.params, strict=True):
            owner, _, attribute = placed.spec.name.rpartition(".")
            setattr(self.module.get_submodule(owner), attribute, parameter)
        hook_parameters(unit.parameters, lambda index: self._collect(unit, gradient, index))
        self.units.append(unit)
        self.gradients.append(gradient)

    # ---- forward and backward

    def pre_forward(self, use: int) -> None:
        """Called before a use's forward; within backward it is a recomputation, whose weights are there already."""
        if not self._is_in_backward:
            self._run(Moment(Phase.PRE_FORWARD, use))

    def post_forward(self, use: int) -> None:
        """Called after a use's forward."""
        if not self._is_in_backward:
            self._run(Moment(Phase.POST_FORWARD, use))

    def pre_backward(self, use: int) -> None:
        """Called when the gradient of a use's output has arrived."""
        if not self._is_in_backward:
            raise RuntimeError("call engine.backward(loss) instead of loss.backward()")
        self._run(Moment(Phase.PRE_BACKWARD, use))

    def backward(self, loss: Tensor, *, microbatches: int = 1, is_last_microbatch: bool = True) -> None:
        """Adds the gradients of one micro-batch; `loss` is its mean loss, `microbatches` their number in this step."""
        self._is_last_microbatch = is_last_microbatch
        self._is_in_backward = True
        try:
            (loss * (self.loss_scaler.scale / microbatches)).backward()
            self._sweep()
        finally:
            self._is_in_backward = False
        self._run(Moment(Phase.AFTER_BACKWARD, 0), is_training=True)
        if not is_last_microbatch:
            self._submit_climbs(Moment(Phase.PRE_FORWARD, 0), is_training=True)

    def _run(self, moment: Moment, is_training: bool | None = None) -> None:
        training = torch.is_grad_enabled() or self._is_in_backward if is_training is None else is_training
        actions = self._schedules[training][moment]
        for name in actions.rest:
            self._unit_of[name].rest(self._policy.weights_in_step)
        self._submit_climbs(moment, training)
        for name in actions.wait:
            self._unit_of[name].wait(Category.WEIGHTS if training else Category.EVALUATION)

    def _submit_climbs(self, moment: Moment, is_training: bool) -> None:
        actions = self._schedules[is_training][moment]
        for name in actions.climb_to_full:
            self._unit_of[name].climb_to_full()
        for name in actions.climb_to_secondary:
            self._unit_of[name].climb_to_secondary()

    # ---- gradients

    def _collect(self, unit: WeightUnit, gradient: UnitGradient, index: int) -> None:
        parameter = unit.parameters[index]
        if parameter.grad is None:
            raise RuntimeError(f"unit {unit.name}: parameter {unit.layout.params[index].spec.name} reported a gradient and has none")
        is_complete = gradient.collect(index, parameter.grad)
        parameter.grad = None
        if is_complete:
            self._descents.complete.add(unit.name)
            self._descend_complete()

    def _sweep(self) -> None:
        """Completes the units that the loss did not reach in full, in the static order."""
        for name in self._descents.order[self._descents.submitted :]:
            if name not in self._descents.complete:
                self._gradient_of[name].fill_missing()
                self._descents.complete.add(name)
        self._descend_complete()
        self._descents.complete.clear()
        self._descents.submitted = 0

    def _descend_complete(self) -> None:
        descents = self._descents
        while descents.submitted < len(descents.order) and descents.order[descents.submitted] in descents.complete:
            gradient = self._gradient_of[descents.order[descents.submitted]]
            gradient.descend(is_last_microbatch=self._is_last_microbatch)
            descents.submitted += 1
            self._under_way.append(gradient)
            if len(self._under_way) > _DESCENTS_UNDER_WAY:
                self._under_way.popleft().finish()

    # ---- step

    def step(self, learning_rate: float) -> StepResult:
        """Updates the weights with the mean gradient, clipped, or skips the update where a NaN or inf is in it, on every rank alike."""
        self.finish_gradients()
        scaled_norm = global_norm(self.gradients, self.ladder)
        grad_norm = scaled_norm / self.loss_scaler.scale
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self.optimizer.step(learning_rate, self._clip_factor(grad_norm) / self.loss_scaler.scale)
        for gradient in self.gradients:
            gradient.clear()
        self.loss_scaler.update(is_overflow=not is_finite)
        if is_finite:
            self.weights_changed()
        self._submit_climbs(Moment(Phase.PRE_FORWARD, 0), is_training=True)
        return StepResult(grad_norm, not is_finite)

    def finish_gradients(self) -> None:
        """Returns once every descent under way has landed."""
        while self._under_way:
            self._under_way.popleft().finish()

    def weights_changed(self) -> None:
        """Must be called after any write to the main weights: makes every rung made from the old ones stale."""
        for unit in self.units:
            unit.invalidate()

    def _clip_factor(self, grad_norm: float) -> float:
        factor = self._options.clip_grad / (grad_norm + _CLIP_EPSILON)
        return factor if 0 < factor < 1 else 1.0

    # ---- accounts

    def model_state_bytes(self) -> int:
        """Bytes of the storages that hold weights, gradients and optimizer state on this rank now."""
        tensors = [tensor for unit in self.units for tensor in unit.live_tensors()]
        tensors += [gradient.total for gradient in self.gradients] + self.optimizer.live_tensors()
        tensors += [parameter.grad for unit in self.units for parameter in unit.parameters if parameter.grad is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    def close(self) -> None:
        """Waits for climbs that were submitted ahead, so that no message is under way when the process groups end."""
        self.ladder.lanes.drain()
