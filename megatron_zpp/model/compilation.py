"""torch.compile for the blocks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from megatron_zpp.model.block import Block
from megatron_zpp.model.gpt import GPT

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}  # dropout draws what it draws without compilation


def compile_blocks(model: GPT) -> None:
    """Makes every block compute by compiled kernels, one compilation for all blocks alike.

    Compiled is what a block computes, not the call of its module: hooks bring the weights before, and take them away after it. Kernels
    take weights as inputs, so the weights may come and go and change between calls; only while a block runs they have to be there.
    """
    for block in model.blocks:
        compiled = torch.compile(cast(Block, block).transformed, dynamic=False, options=OPTIONS)
        setattr(block, "transformed", compiled)  # noqa: B010


def check_compilation(device: torch.device) -> None:
    """Nothing, where torch compiles for this device: a small function is compiled and run.

    Raises ValueError with what is missing.
    """
    needed = "a C++ compiler (g++)" if device.type == "cpu" else "package triton"
    try:
        torch.compile(_probe, options=OPTIONS)(torch.zeros(64, device=device))
    except Exception as error:  # torch has a class of its own for everything that can be missing
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--compile: torch cannot compile for {device.type} here ({reason}); install {needed}, or leave --compile out."
        ) from None


def _probe(values: torch.Tensor) -> torch.Tensor:
    return values.sin() + values
