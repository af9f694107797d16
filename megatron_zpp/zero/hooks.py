"""Hooks on modules and parameters. They only call the engine: the schedule decides what happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_zpp.parallel.specs import Use


class UseCallbacks(Protocol):
    """Receives the calls of the hooks on modules."""

    def pre_forward(self, use: int) -> None: ...

    def post_forward(self, use: int) -> None: ...

    def pre_backward(self, use: int) -> None: ...


def hook_uses(module: nn.Module, uses: Sequence[Use], callbacks: UseCallbacks) -> list[RemovableHandle]:
    """Handles of hooks that call `callbacks` before and after each use's forward, and when the gradient of its output arrives.

    The latter is a hook on the output's gradient, because such a hook runs before recomputation in every kind of activation checkpointing.
    """
    handles = []
    for index, use in enumerate(uses):
        submodule = module.get_submodule(use.module)
        handles.append(submodule.register_forward_pre_hook(partial(_pre_forward, callbacks, index)))
        handles.append(submodule.register_forward_hook(partial(_post_forward, callbacks, index)))
    return handles


def refuse_forward(module: nn.Module, uses: Sequence[Use]) -> None:
    """Makes each use's forward raise RuntimeError, because the engine of the module is closed."""
    for use in uses:
        module.get_submodule(use.module).register_forward_pre_hook(_refuse_forward)


def is_hooked(module: nn.Module) -> bool:
    """Whether this module or one in it has, or had, an engine."""
    hooks = [hook for inner in module.modules() for hook in inner._forward_pre_hooks.values()]
    return any(hook is _refuse_forward or (isinstance(hook, partial) and hook.func is _pre_forward) for hook in hooks)


def hook_parameters(parameters: Sequence[nn.Parameter], collect: Callable[[int], None]) -> list[RemovableHandle]:
    """Handles of hooks that call collect(index) when a parameter's gradient is complete: once per backward, even if two uses share it."""
    return [parameter.register_post_accumulate_grad_hook(partial(_collect, collect, index)) for index, parameter in enumerate(parameters)]


def _pre_forward(callbacks: UseCallbacks, use: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    callbacks.pre_forward(use)


def _refuse_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise RuntimeError(f"{type(module).__name__} has no weights any more, because its engine is closed")


def _post_forward(callbacks: UseCallbacks, use: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not isinstance(output, Tensor):
        raise RuntimeError(f"{type(module).__name__}, the module of a use, returns a {type(output).__name__}; it must return one tensor")
    if torch.is_grad_enabled() and output.requires_grad:
        output.register_hook(partial(_pre_backward, callbacks, use))
    callbacks.post_forward(use)


def _pre_backward(callbacks: UseCallbacks, use: int, gradient: Tensor) -> None:
    callbacks.pre_backward(use)


def _collect(collect: Callable[[int], None], index: int, parameter: Tensor) -> None:
    collect(index)
