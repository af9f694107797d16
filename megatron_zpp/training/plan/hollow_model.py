"""A model without computation, under whose hooks the engine does what it does under those of the model that was recorded.

Its parameters have the names and shapes of the model's. Each use plays its parts of the record, and gives parameters gradients in the
recorded order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_zpp.model.recompute import recomputed
from megatron_zpp.training.plan.model_record import Event, Mark, ModelRecord, Part

_USES = (Event.FORWARD, Event.RECOMPUTE)


class Player:
    """Plays the parts of records, one micro-batch after the other. on_part: is called with each part."""

    def __init__(self, on_part: Callable[[Part], None]) -> None:
        self._parts: Sequence[Part] = ()
        self._on_part = on_part
        self._next = 0  # the part whose mark comes next
        self._is_played = True  # the part before it

    def begin(self, record: ModelRecord) -> None:
        """Begins a micro-batch of this record."""
        self._parts, self._next, self._is_played = record.parts, 0, True

    def reach_use(self, use: int) -> None:
        """Plays everything before the use's forward or its recomputation."""
        self._reach(lambda mark: mark.event in _USES and mark.use == use)

    def reach_gradient(self, parameter: str) -> None:
        self._reach(lambda mark: mark.event is Event.GRADIENT and mark.parameter == parameter)

    @property
    def recomputes_next(self) -> bool:
        """Whether a use is recomputed before the next gradient. (That of a bias alone needs nothing that forward made.)"""
        events = (part.mark.event for part in self._parts[self._next :])
        return next((event for event in events if event in (Event.RECOMPUTE, Event.GRADIENT)), None) is Event.RECOMPUTE

    def play(self) -> None:
        """Plays the part that has been reached."""
        if not self._is_played:
            self._is_played = True
            self._on_part(self._parts[self._next - 1])

    def play_before_use(self) -> None:
        """Plays until the next use is reached, or the end."""
        self._reach(lambda mark: mark.event is Event.BACKWARD or mark.event in _USES, must_be_there=False, stops_before=True)

    def _reach(self, is_wanted: Callable[[Mark], bool], *, must_be_there: bool = True, stops_before: bool = False) -> None:
        self.play()
        while self._next < len(self._parts):
            part = self._parts[self._next]
            if is_wanted(part.mark):
                if not stops_before:
                    self._next += 1
                    self._is_played = False
                return
            if part.mark.event is Event.GRADIENT or part.mark.event in _USES:
                raise RuntimeError(f"a plan comes to another moment than the model did, which came to {part.mark}")
            self._next += 1
            self._on_part(part)
        if must_be_there:
            raise RuntimeError("a plan comes to a moment that the model did not come to")

    def play_all(self) -> None:
        """Plays what is left of the micro-batch."""
        self._reach(lambda mark: False, must_be_there=False)


class HollowModel(nn.Module):
    """quietly: a context in which tensors are not counted, because the record has counted those of the model."""

    def __init__(self, record: ModelRecord, player: Player, quietly: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._uses = record.uses
        self.player = player
        self.quietly = quietly
        for unit in record.units:
            for spec in unit.params:
                owner, _, attribute = spec.name.rpartition(".")
                self._module_at(owner).register_parameter(attribute, nn.Parameter(torch.empty(spec.shape, device="meta")))
        of_uses: dict[int, list[str]] = {}  # parameters in the order of their gradients, by the use that brings them
        for part in record.parts:
            if part.mark.event is Event.GRADIENT:
                of_uses.setdefault(part.mark.use, []).append(part.mark.parameter)
        self._modules_of_uses = [self._module_at(use.module) for use in self._uses]
        for index, module in enumerate(self._modules_of_uses):
            parameters = [(name, self._module_at(name.rpartition(".")[0])) for name in of_uses.get(index, [])]
            module.plan = _PlannedUse(self, index, parameters)

    def forward(self) -> Tensor:
        """What stands for the loss, []."""
        with self.quietly():
            hidden = torch.zeros((), device="meta")
        for chunk, uses in groupby(range(len(self._uses)), key=lambda use: self._uses[use].recomputed_in):
            indices = tuple(uses)
            hidden = self._through(indices, hidden) if chunk is None else recomputed(self._through, indices, hidden)
        return hidden

    def _through(self, uses: Sequence[int], hidden: Tensor) -> Tensor:
        for use in uses:
            hidden = self._modules_of_uses[use](hidden)
        return hidden

    def _module_at(self, path: str) -> _Hollow:
        module: nn.Module = self
        for name in path.split(".") if path else ():
            if name not in module._modules:
                module.add_module(name, _Hollow())
            module = module.get_submodule(name)
        return cast(_Hollow, module)


class _Hollow(nn.Module):
    """Has parameters and other modules. plan: if it is the module of a use."""

    plan: _PlannedUse

    def forward(self, hidden: Tensor) -> Tensor:
        return self.plan.forward(hidden)


@dataclass(eq=False)
class _PlannedUse:
    """One use of the model. parameters: the names of those that get gradients in its backward, in order, and the modules that have them."""

    model: HollowModel
    use: int
    parameters: Sequence[tuple[str, nn.Module]]

    def forward(self, hidden: Tensor) -> Tensor:
        with self.model.quietly():
            self.model.player.reach_use(self.use)
            self.model.player.play()
            hidden = _End.apply(hidden, self.model)
            for name, owner in reversed(self.parameters):
                hidden = _Gradient.apply(hidden, owner._parameters[name.rpartition(".")[2]], self.model, name)
        return hidden


class _Gradient(torch.autograd.Function):
    """Brings one parameter a gradient, when the model did."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parameter: Tensor, model: HollowModel, name: str) -> Tensor:
        ctx.save_for_backward(parameter)
        ctx.model, ctx.name, ctx.shape, ctx.dtype = model, name, parameter.shape, parameter.dtype
        ctx.mark_dirty(hidden)  # a copy would be one operator more for each parameter
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.model.player.recomputes_next:
            _ = ctx.saved_tensors  # calls the forward of the chunk again
        with ctx.model.quietly():
            ctx.model.player.reach_gradient(ctx.name)
            return grad, grad.new_empty(ctx.shape, dtype=ctx.dtype), None, None


class _End(torch.autograd.Function):
    """Stands where the backward of a use ends."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, model: HollowModel) -> Tensor:
        ctx.model = model
        return hidden.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with ctx.model.quietly():
            ctx.model.player.play_before_use()
            return grad.clone(), None  # not the gradient of the loss, which a run does not keep
