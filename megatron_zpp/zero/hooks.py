"""Hooks on modules and parameters, and nodes in the autograd graph. They only report: zero/training_pass.py says what happens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from megatron_zpp.parallel.specs import Use, outer_units

# What may be in an output. Anything else could hold tensors whose gradients nothing would announce.
_KNOWN = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Call:
    """A call of a use in a forward with gradients. number: counts these calls. begun: how many had ended before it began.

    forward, step: count the forwards and the steps.
    """

    use: int
    number: int
    begun: int
    forward: int
    step: int


class UseCallbacks(Protocol):
    """Receives the calls of the hooks on modules."""

    def begin_forward(self) -> None: ...

    def end_forward(self, outputs: Sequence[Tensor]) -> Call | None: ...

    def pre_forward(self, use: int) -> None: ...

    def post_forward(self, use: int, outputs: Sequence[Tensor]) -> Call | None: ...

    def pre_backward(self, use: int, call: Call | None) -> None: ...


class GradientCallbacks(Protocol):
    """Receives the calls of the hooks on parameters."""

    def collect(self, unit: str, index: int) -> None: ...


def hook_uses(module: nn.Module, uses: Sequence[Use], callbacks: UseCallbacks) -> list[RemovableHandle]:
    """Handles of hooks that call `callbacks` before and after the forward of `module` and of each use, and before each use's backward."""
    handles = []
    for index, use in enumerate(uses):
        submodule = module.get_submodule(use.module)
        before = partial(before_forward, callbacks, index)
        handles.append(submodule.register_forward_pre_hook(before, prepend=True))  # other hooks may read weights
        if submodule is module and outer_units(uses):
            continue  # it ends with the forward of the module
        handles.append(submodule.register_forward_hook(partial(_after_forward, callbacks, index)))
        # nn.Module.compile() would compile these hooks as well; this one compiles forward alone.
        submodule.compile = partial(_compile_forward, submodule)  # type: ignore[method-assign]
    # The module itself may be a use: its forward begins before this use and ends after it.
    handles.append(module.register_forward_pre_hook(partial(_begin_forward, callbacks), prepend=True))
    handles.append(module.register_forward_hook(partial(_end_forward, callbacks)))
    return handles


def hook_parameters(unit: str, parameters: Sequence[nn.Parameter], callbacks: GradientCallbacks) -> list[RemovableHandle]:
    """Handles of hooks that call callbacks.collect(unit, index) when a parameter's gradient is complete.

    This comes once per backward, even if two uses share the parameter.
    """
    own = weakref.proxy(callbacks)  # what a tensor's hook refers to is hidden from the garbage collector
    return [parameter.register_post_accumulate_grad_hook(partial(_collect, own, unit, index)) for index, parameter in enumerate(parameters)]


def _compile_forward(module: nn.Module, *arguments: Any, **options: Any) -> None:
    """Takes the arguments of torch.compile()."""
    module.forward = torch.compile(module.forward, *arguments, **options)


def before_forward(callbacks: UseCallbacks, use: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    with _no_inference_mode():
        callbacks.pre_forward(use)


def _after_forward(callbacks: UseCallbacks, use: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    outputs = Outputs(output)
    outputs.check(module)
    with _no_inference_mode():
        call = callbacks.post_forward(use, outputs.tensors)
    return outputs.watched(partial(callbacks.pre_backward, use, call), call)


def _begin_forward(callbacks: UseCallbacks, module: nn.Module, args: tuple[Any, ...]) -> None:
    with _no_inference_mode():
        callbacks.begin_forward()


def _end_forward(callbacks: UseCallbacks, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Watches what the module returns if its call is a use with gradients, which units in it need not announce."""
    outputs = Outputs(output)
    with _no_inference_mode():
        call = callbacks.end_forward(outputs.tensors)
    return output if call is None else outputs.watched(partial(callbacks.pre_backward, call.use, call), call)


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """No tensor that is made in torch.inference_mode may be written to outside of it, and the engine uses its buffers again."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _collect(callbacks: GradientCallbacks, unit: str, index: int, parameter: Tensor) -> None:
    callbacks.collect(unit, index)


class Outputs:
    """The output of a module: a tensor, or tensors in tuples, lists and dictionaries.

    tensors: all of them, in order.
    """

    def __init__(self, output: Any) -> None:
        self._output = output
        self._leaves: list[Any]
        self._structure: TreeSpec
        self._leaves, self._structure = tree_flatten(output)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]

    def check(self, module: nn.Module) -> None:
        """Raises RuntimeError for an output in which tensors could be hidden."""
        unknown = next((leaf for leaf in self._leaves if not isinstance(leaf, _KNOWN)), None)
        if unknown is not None or not self.tensors:
            found = type(self._output if unknown is None else unknown).__name__
            raise RuntimeError(
                f"{type(module).__name__}, the module of a use, returns {found}; it must return a tensor, or tensors in tuples, lists and "
                "dictionaries"
            )

    def watched(self, before_backward: Callable[[], None], call: Call | None) -> Any:
        """The same output. When all gradients of its tensors have come, `before_backward` is called, then they go on into the module.

        call: the call of the module, which `calls_of` finds.
        """
        by_id = {id(tensor): tensor for tensor in self.tensors if tensor.requires_grad}
        if not (torch.is_grad_enabled() and by_id):
            return self._output
        tensors = _Watch.apply(before_backward, call, *by_id.values())
        watched = dict(zip(by_id, tensors, strict=True))  # one that is returned twice stays one
        return tree_unflatten([watched.get(id(leaf), leaf) for leaf in self._leaves], self._structure)


def calls_of(loss: Tensor) -> Iterator[Call]:
    """The calls whose watched outputs `loss` depends on."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            call = getattr(node, "call", None)
            if isinstance(call, Call):
                yield call


class _Watch(torch.autograd.Function):
    """Returns its tensors as they are; its backward calls `before_backward` and passes their gradients on.

    A hook on an output would not do: the output may be the input of the module, which has hooks already, or a view, which loses its hooks
    when it is written to. This node belongs to one call of one module, and is made after all others of the call. So autograd runs it before
    those that recompute the module, and before those of a loss that the module keeps beside its output.

    What it returns shares memory with its tensors and has another history. So its backward raises RuntimeError if one of them is still held
    somewhere and was written to: its values have changed and its history has not, so gradients would be wrong.
    """

    @staticmethod
    def forward(ctx: Any, before_backward: Callable[[], None], call: Call | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.before_backward = before_backward
        ctx.call = call
        ctx.versions = [(weakref.ref(tensor), tensor._version) for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        held = [(tensor, version) for reference, version in ctx.versions if (tensor := reference()) is not None]
        if any(tensor._version != version for tensor, version in held):
            raise RuntimeError(
                "a tensor that a module returned was written to in place while something else, such as an attribute of the module, "
                "holds it; keep or write to a copy (.clone())"
            )
        ctx.before_backward()
        return (None, None, *gradients)
