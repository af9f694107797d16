"""Hooks on the modules of the uses and on the parameters; they only call the engine's moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_zpp.parallel.specs import Use


class Moments(Protocol):
    """What the hooks report to."""

    def pre_forward(self, use: int) -> None: ...

    def post_forward(self, use: int) -> None: ...

    def pre_backward(self, use: int) -> None: ...


def hook_uses(module: nn.Module, uses: Sequence[Use], moments: Moments) -> None:
    """Lets `moments` know of each use's forward and of the arrival of its output's gradient.

    The backward of a use is announced by a hook on its output: it fires before recomputation, with every kind of checkpointing.
    """
    for index, use in enumerate(uses):
        submodule = module.get_submodule(use.module)
        submodule.register_forward_pre_hook(partial(_pre_forward, moments, index))
        submodule.register_forward_hook(partial(_post_forward, moments, index))


def hook_parameters(parameters: Sequence[nn.Parameter], collect: Callable[[int], None]) -> list[RemovableHandle]:
    """Handles of hooks that call collect(index) when the gradient of this backward is whole: once, also where two uses contribute."""
    return [parameter.register_post_accumulate_grad_hook(partial(_collect, collect, index)) for index, parameter in enumerate(parameters)]


def _pre_forward(moments: Moments, use: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    moments.pre_forward(use)


def _post_forward(moments: Moments, use: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not isinstance(output, Tensor):
        raise RuntimeError(f"{type(module).__name__}, the module of a use, returns a {type(output).__name__}; needed is one tensor")
    if torch.is_grad_enabled() and output.requires_grad:
        output.register_hook(partial(_pre_backward, moments, use))
    moments.post_forward(use)


def _pre_backward(moments: Moments, use: int, gradient: Tensor) -> None:
    moments.pre_backward(use)


def _collect(collect: Callable[[int], None], index: int, parameter: Tensor) -> None:
    collect(index)
