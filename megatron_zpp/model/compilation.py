"""Applies torch.compile to the blocks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from megatron_zpp.model.attention_kernel import take_as_constants
from megatron_zpp.model.block import Block
from megatron_zpp.model.gpt import GPT
from megatron_zpp.system.user_error import UserError

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}  # attention drops the same as uncompiled


def compile_blocks(model: GPT) -> None:
    """Makes every block run on compiled kernels; one compilation serves all blocks.

    Only `Block.transformed` is compiled, not the call of the module: its hooks gather the weights before the block and free them after it.
    The kernels receive weights as inputs, so weights may be freed and changed between calls.
    """
    take_as_constants()
    for block in model.blocks:
        compiled = torch.compile(cast(Block, block).transformed, dynamic=False, options=OPTIONS)
        setattr(block, "transformed", compiled)  # noqa: B010


def check_compilation(device: torch.device) -> None:
    """Raises UserError, saying what to install, if torch cannot compile for this device; a small function is compiled and run."""
    needed = "a C++ compiler (g++)" if device.type == "cpu" else "package triton"
    try:
        torch.compile(_probe, options=OPTIONS)(torch.zeros(64, device=device))
    except Exception as error:  # torch has a different class for everything that can be missing
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--compile: torch cannot compile for {device.type} here ({reason}); install {needed}, or leave --compile out."
        ) from None


def _probe(values: torch.Tensor) -> torch.Tensor:
    return values.sin() + values
