"""Dropout whose mask is a function of a key and of each element's index, so that it does not depend on how elements are divided.

No generator is read and no mask is kept: backward computes the mask again, from the key and the index of the first element.
megatron_zpp.ops.dropout_reference defines the arithmetic. The kernels of csrc/dropout/ give the same bits; they run if they are loaded and
support the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops import dropout_reference
from megatron_zpp.ops.checks import VALUE_DTYPES, check_dtype
from megatron_zpp.ops.extension import ops_for

KEYS = 2**63
WORDS = 2**32


@dataclass(frozen=True)
class Gaps:
    """Where indices of neighbours differ by 1 + `leap` instead of 1: after the first `first_run` elements, then after every `run`."""

    first_run: int
    run: int
    leap: int


def mask_start(key: int, first_index: int, gaps: Gaps | None = None) -> Tensor:
    """int64 on the host: the key of a mask (0 to 2^63 - 1), the index of its first element (0 to 2^63 - 1), and gaps if there are any.

    It is a tensor because torch.compile compiles a function again for every other integer, but not for other values of a tensor.
    """
    numbers = [key, first_index] if gaps is None else [key, first_index, gaps.first_run, gaps.run, gaps.leap]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def dropout(values: Tensor, start: Tensor, p: float) -> Tensor:
    """`values` with elements dropped with probability p, the others divided by 1 - p; contiguous, same shape and dtype. Differentiable.

    values: fp32, bf16 or fp16. start: of mask_start; the elements of `values`, row by row, have its index and those after it, but for gaps.
    Raises ValueError for another dtype, and for a p that is not at least 0 and below 1.
    """
    check_dtype("values", values, VALUE_DTYPES)
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}; expected a probability of at least 0 and below 1.")
    dropped: Tensor = torch.ops.megatron_zpp.dropout(values, start, p)
    return dropped


# An operator of torch's, not only a function, so that torch.compile calls it as it is. (torch.library.custom_op would import the compiler.)
_OPERATOR = "megatron_zpp::dropout"
torch.library.define(_OPERATOR, "(Tensor values, Tensor start, float p) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


@torch.library.impl(_OPERATOR, "default")
def _dropout(values: Tensor, start: Tensor, p: float) -> Tensor:
    key, first_index, *gaps = start.tolist()
    values = values.contiguous()
    dropped = torch.empty_like(values)
    ops = ops_for(values, dropout_reference)
    threshold, scale = min(round(p * WORDS), WORDS - 1), 1 / (1 - p)
    if not gaps:
        ops.drop_values(values, dropped, key, first_index, threshold, scale)
        return dropped
    flat, flat_dropped = values.view(-1), dropped.view(-1)
    for own, index in _runs(values.numel(), first_index, Gaps(*gaps)):
        ops.drop_values(flat[own], flat_dropped[own], key, index, threshold, scale)
    return dropped


def _runs(numel: int, first_index: int, gaps: Gaps) -> Iterator[tuple[slice, int]]:
    """The elements whose indices follow each other, and the index of the first of them, run after run."""
    start, stop, index = 0, gaps.first_run, first_index
    while start < numel:
        yield slice(start, min(stop, numel)), index
        start, stop, index = stop, stop + gaps.run, index + stop - start + gaps.leap


@torch.library.register_fake(_OPERATOR)  # type: ignore[untyped-decorator]
def _without_values(values: Tensor, start: Tensor, p: float) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


# `start` is not a saved tensor: a recomputation ends with the last saved tensor, so it can end before the dropout.
def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    _, ctx.start, ctx.p = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.megatron_zpp.dropout(grad, ctx.start, ctx.p), None, None


torch.library.register_autograd(_OPERATOR, _backward, setup_context=_keep)
