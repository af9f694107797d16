"""Hooks on modules and parameters. They only call the engine: the schedule decides what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_zpp.parallel.specs import Use
from megatron_zpp.zero.calls import Call
from megatron_zpp.zero.outputs import Outputs


class UseCallbacks(Protocol):
    """Receives the calls of the hooks on modules."""

    def begin_forward(self) -> None: ...

    def end_forward(self) -> None: ...

    def pre_forward(self, use: int) -> None: ...

    def post_forward(self, use: int, outputs: Sequence[Tensor]) -> Call | None: ...

    def pre_backward(self, use: int, call: Call | None) -> None: ...


def hook_uses(module: nn.Module, uses: Sequence[Use], callbacks: UseCallbacks) -> list[RemovableHandle]:
    """Handles of hooks that call `callbacks` before and after the forward of `module` and of each use, and before each use's backward."""
    handles = []
    for index, use in enumerate(uses):
        submodule = module.get_submodule(use.module)
        before = partial(before_forward, callbacks, index)
        handles.append(submodule.register_forward_pre_hook(before, prepend=True))  # other hooks may read weights
        handles.append(submodule.register_forward_hook(partial(_after_forward, callbacks, index)))
        # nn.Module.compile() would compile the hooks as well, which call the engine; this one compiles what they are around.
        submodule.compile = partial(_compile_forward, submodule)  # type: ignore[method-assign]
    # The module itself may be a use: its forward begins before this use and ends after it.
    handles.append(module.register_forward_pre_hook(partial(_call, callbacks.begin_forward), prepend=True))
    handles.append(module.register_forward_hook(partial(_call, callbacks.end_forward)))
    return handles


def hook_parameters(parameters: Sequence[nn.Parameter], collect: Callable[[int], None]) -> list[RemovableHandle]:
    """Handles of hooks that call collect(index) when a parameter's gradient is complete: once per backward, even if two uses share it."""
    return [parameter.register_post_accumulate_grad_hook(partial(_collect, collect, index)) for index, parameter in enumerate(parameters)]


def _compile_forward(module: nn.Module, *arguments: Any, **options: Any) -> None:
    """Takes the arguments of torch.compile()."""
    module.forward = torch.compile(module.forward, *arguments, **options)


def before_forward(callbacks: UseCallbacks, use: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    with _no_inference_mode():
        callbacks.pre_forward(use)


def _after_forward(callbacks: UseCallbacks, use: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    outputs = Outputs(module, output)
    with _no_inference_mode():
        call = callbacks.post_forward(use, outputs.tensors)
    return outputs.watched(partial(callbacks.pre_backward, use, call), call)


def _call(callback: Callable[[], None], module: nn.Module, *inputs_and_outputs: Any) -> None:
    with _no_inference_mode():
        callback()


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """No tensor that is made in torch.inference_mode may be written to outside of it, and the engine uses its buffers again."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _collect(collect: Callable[[int], None], index: int, parameter: Tensor) -> None:
    collect(index)
