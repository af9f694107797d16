"""The borders of divided layers: what crosses the tensor link where activations enter and leave them.

Between the layers every rank has all tokens [B, S, H] or, with sequence parallelism, its own part of them [B, S / T, H]: part t of the
flattened B S tokens, so the parts of all ranks, one after the other, are [B, S, H]. Inside, a rank has all tokens and a part of the
channels, and what it adds to the output is its part of a sum over the ranks.

    with sequence parallelism     forward             backward
    enter          no             -                   sum
                   yes            gather              sum, own tokens
    leave          no             sum                 -
                   yes            sum, own tokens     gather

None of these functions keeps a tensor. A recomputation ends with the last tensor that backward needs, so it repeats the sum behind a layer
only if a layer follows in the same recomputation; this is the same on every rank, because all ranks keep the same tensors.

B micro-batch size, S tokens per sample, H hidden size, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.tensor_parallel.context import TensorParallel

Crossing = Callable[[Tensor], Tensor]


def enter(hidden: Tensor, tensor: TensorParallel) -> Tensor:
    """hidden_BSH, the input of a divided layer, from what a rank has between the layers."""
    link = tensor.link
    if tensor.sequence_parallel:
        return region(hidden, partial(gathered_tokens, link=link), partial(own_tokens_of_sum, link=link))
    return region(hidden, _same, link.summed)


def leave(part_BSH: Tensor, tensor: TensorParallel) -> Tensor:
    """The sum of all ranks' `part_BSH`, as a rank has it between the layers. Added in fp32, in the order of the ranks, and rounded once."""
    link = tensor.link
    if tensor.sequence_parallel:
        return region(part_BSH, partial(own_tokens_of_sum, link=link), partial(gathered_tokens, link=link))
    return region(part_BSH, link.summed, _same)


def gathered_channels(own: Tensor, link: TensorLink) -> Tensor:
    """[..., T n] from [..., n] of every rank, in the order of the ranks. All ranks must have the same gradient of it."""
    return region(
        own, lambda own: link.gather(own).movedim(0, -2).flatten(-2), lambda gradient: gradient.chunk(link.ranks, dim=-1)[link.rank]
    )


def gathered_tokens(own: Tensor, link: TensorLink) -> Tensor:
    """[B, S, H]: the tokens [B, S / T, H] of every rank. Not differentiable; `enter` is."""
    return joined(link.gather(own))


def joined(parts: Tensor) -> Tensor:
    """[B, S, H], from the parts [T, B, S / T, H] of all ranks; without a copy."""
    ranks, samples, length, width = parts.shape
    return parts.view(samples, ranks * length, width)


def own_tokens_of_sum(part_BSH: Tensor, link: TensorLink) -> Tensor:
    """[B, S / T, H], the rank's tokens of the sum of all ranks' `part_BSH`. Not differentiable; `leave` is.

    Raises RuntimeError if the ranks cannot share the tokens of a sample.
    """
    samples, length, width = part_BSH.shape
    if length % link.ranks:
        raise RuntimeError(f"{link.ranks} tensor ranks cannot divide samples of {length} tokens (--sequence-parallel)")
    return link.sum_scattered(part_BSH.reshape(samples * length, width)).view(samples, length // link.ranks, width)


def _same(values: Tensor) -> Tensor:
    return values.view_as(values)


def region(values: Tensor, forward: Crossing, backward: Crossing) -> Tensor:
    """forward(values), whose gradient is backward(gradient of it). Neither is differentiated, and nothing is kept."""
    crossed: Tensor = _Region.apply(values, forward, backward)
    return crossed


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, forward: Crossing, backward: Crossing) -> Tensor:
        ctx.crosses_back = backward
        return forward(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.crosses_back(gradient), None, None
