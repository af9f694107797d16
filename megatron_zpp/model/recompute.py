"""Activation recomputation: keeps only the inputs of a function, and calls it again in backward.

torch.utils.checkpoint does the same, but imports the compiler when it is first called: 2 seconds and 74 MB in every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def recomputed(
    function: Callable[..., Tensor], *inputs: Any, restores_generator: bool = False, hooks: saved_tensors_hooks | None = None
) -> Tensor:
    """function(*inputs), whose activations are computed again in backward instead of kept (Chen et al., arXiv 1604.06174).

    The call is repeated, so forward-pre hooks of the modules in it fire again in backward. The forward hooks of the last module may not
    fire: the repetition stops as soon as it has computed the last activation that backward needs. Backward may run once.
    restores_generator: needed if the function draws random numbers on the device of its first input and does not seed their generator.
    hooks: keep the tensors among the inputs. Tensors that the function saves pass them by, because they are not kept.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    call = _RepeatedCall(function, inputs, restores_generator, nullcontext() if hooks is None else hooks)
    with saved_tensors_hooks(call.leave_out, call.find):
        return function(*inputs)


Kind = tuple[torch.Size, torch.dtype, torch.device]
_TENSOR = object()  # stands for an input that is a tensor


class _RepeatedCall:
    """A call whose saved tensors are left out, each at a place in the order in which they were saved, and found by a second call."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Any, ...], restores_generator: bool, hooks: Any) -> None:
        self._function = function
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        self._inputs_but_tensors = [_TENSOR if isinstance(each, Tensor) else each for each in inputs]
        with hooks:
            self._inputs: Any = _Saved.apply(torch.empty(0, requires_grad=True), *tensors)
        self._draws_as_before = _draws_from_here(tensors[0].device) if restores_generator else nullcontext
        self._left_out: list[Kind] = []
        self._found: list[Tensor | None] = []

    def leave_out(self, tensor: Tensor) -> int:
        """The place of a tensor that the call saves."""
        self._left_out.append(_kind(tensor))
        return len(self._left_out) - 1

    def find(self, place: int) -> Tensor:
        """The tensor of this place."""
        if not self._found:
            self._call_again()
        tensor, self._found[place] = self._found[place], None  # freed as soon as backward has used it
        if tensor is None:
            raise RuntimeError("backward runs through a recomputed function for the second time; keep no graph (retain_graph) of it")
        return tensor

    def _call_again(self) -> None:
        tensors = iter(self._inputs.grad_fn.saved_tensors)
        inputs = [_leaf(next(tensors)) if other is _TENSOR else other for other in self._inputs_but_tensors]
        try:
            with torch.enable_grad(), self._draws_as_before(), saved_tensors_hooks(self._take, _unneeded):
                self._function(*inputs)
        except _AllFound:
            return
        raise RuntimeError(f"a recomputed function saved {len(self._left_out)} tensors at first, and then only {len(self._found)}")

    def _take(self, tensor: Tensor) -> None:
        place = len(self._found)
        if _kind(tensor) != self._left_out[place]:
            raise RuntimeError(f"tensor {place} that a recomputed function saved was {self._left_out[place]}, and is now {_kind(tensor)}")
        self._found.append(tensor.detach())
        if place + 1 == len(self._left_out):
            raise _AllFound


class _AllFound(Exception):
    """Ends a second call that has computed all that is needed."""


class _Saved(torch.autograd.Function):
    """Saves tensors in the graph of autograd, which frees them with the rest. The first one only makes a node."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("nothing depends on it")


def _kind(tensor: Tensor) -> Kind:
    return tensor.shape, tensor.dtype, tensor.device


def _leaf(tensor: Tensor) -> Tensor:
    """The same values, from which backward goes no further."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _unneeded(packed: None) -> Tensor:
    raise AssertionError("no backward runs through the second call")


def _draws_from_here(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context in which random numbers of the device are those that are drawn from now on. The generator goes on as if it had not been."""
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    state = generator.get_state()

    @contextmanager
    def drawing() -> Iterator[None]:
        present = generator.get_state()
        generator.set_state(state)
        try:
            yield
        finally:
            generator.set_state(present)

    return drawing
