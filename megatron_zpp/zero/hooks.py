"""Hooks on modules and parameters. They only call the engine: the schedule decides what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from megatron_zpp.parallel.specs import Use


class UseCallbacks(Protocol):
    """Receives the calls of the hooks on modules."""

    def pre_forward(self, use: int) -> None: ...

    def post_forward(self, use: int, outputs: Sequence[Tensor]) -> None: ...

    def pre_backward(self, use: int) -> None: ...


def hook_uses(module: nn.Module, uses: Sequence[Use], callbacks: UseCallbacks) -> list[RemovableHandle]:
    """Handles of hooks that call `callbacks` before and after each use's forward, and before its backward.

    The first of them comes before hooks that the module has already, because these may read weights.
    """
    handles = []
    for index, use in enumerate(uses):
        submodule = module.get_submodule(use.module)
        handles.append(submodule.register_forward_pre_hook(partial(_pre_forward, callbacks, index), prepend=True))
        handles.append(submodule.register_forward_hook(partial(_post_forward, callbacks, index)))
    return handles


def refuse_forward(module: nn.Module, uses: Sequence[Use]) -> None:
    """Makes each use's forward raise RuntimeError, because the engine of the module is closed."""
    for use in uses:
        module.get_submodule(use.module).register_forward_pre_hook(_refuse_forward, prepend=True)


def is_hooked(module: nn.Module) -> bool:
    """Whether this module or one in it has, or had, an engine."""
    hooks = [hook for inner in module.modules() for hook in inner._forward_pre_hooks.values()]
    return any(hook is _refuse_forward or (isinstance(hook, partial) and hook.func is _pre_forward) for hook in hooks)


def hook_parameters(parameters: Sequence[nn.Parameter], collect: Callable[[int], None]) -> list[RemovableHandle]:
    """Handles of hooks that call collect(index) when a parameter's gradient is complete: once per backward, even if two uses share it."""
    return [parameter.register_post_accumulate_grad_hook(partial(_collect, collect, index)) for index, parameter in enumerate(parameters)]


class _BeforeBackward(torch.autograd.Function):
    """Returns its tensors as they are. Its backward calls `pre_backward` of the use that they come from, then passes their gradients on.

    A hook on an output would not do: the output may be the input of the module, which has hooks already, or a view, which loses its hooks
    when it is written to. This node is of the use alone, and the last one of it: autograd runs it before the others, also before those
    that recompute the use or that a loss reads beside the output.
    """

    @staticmethod
    def forward(ctx: Any, callbacks: UseCallbacks, use: int, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.callbacks, ctx.use = callbacks, use
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.callbacks.pre_backward(ctx.use)
        return (None, None, *gradients)


def _pre_forward(callbacks: UseCallbacks, use: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    with _without_inference_mode():
        callbacks.pre_forward(use)


def _refuse_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise RuntimeError(f"{type(module).__name__} has no weights any more, because its engine is closed")


def _post_forward(callbacks: UseCallbacks, use: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    leaves, structure = tree_flatten(output)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    opaque = next((leaf for leaf in leaves if not isinstance(leaf, _TRANSPARENT)), None)
    if opaque is not None or not places:
        raise RuntimeError(
            f"{type(module).__name__}, the module of a use, returns a {type(output if opaque is None else opaque).__name__}; it must "
            "return a tensor, or tensors in tuples, lists and dictionaries"
        )
    with _without_inference_mode():
        callbacks.post_forward(use, [leaves[index] for index in places])
    if not torch.is_grad_enabled():
        return output
    places = [index for index in places if leaves[index].requires_grad]
    if not places:
        return output
    for index, leaf in zip(places, _BeforeBackward.apply(callbacks, use, *(leaves[index] for index in places)), strict=True):
        leaves[index] = leaf
    return tree_unflatten(leaves, structure)


# What may be in an output. Anything else could hold tensors whose gradients nothing would announce.
_TRANSPARENT = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    """Tensors that are made under torch.inference_mode could never be written to outside of it, and the engine uses them again."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def _collect(collect: Callable[[int], None], index: int, parameter: Tensor) -> None:
    collect(index)
