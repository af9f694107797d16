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

from typing import Any

import torch
from torch import Tensor

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.tensor_parallel.context import TensorParallel


def enter(hidden: Tensor, tensor: TensorParallel) -> Tensor:
    """hidden_BSH, the input of a divided layer, from what a rank has between the layers."""
    region = _GatheredTokens if tensor.sequence_parallel else _Copied
    entered: Tensor = region.apply(hidden, tensor.link)
    return entered


def leave(part_BSH: Tensor, tensor: TensorParallel) -> Tensor:
    """The sum of all ranks' `part_BSH`, as a rank has it between the layers. Added in fp32, in the order of the ranks, and rounded once."""
    region = _ScatteredTokens if tensor.sequence_parallel else _Reduced
    left: Tensor = region.apply(part_BSH, tensor.link)
    return left


def gathered_channels(own: Tensor, link: TensorLink) -> Tensor:
    """[..., T n] from [..., n] of every rank, in the order of the ranks. All ranks must have the same gradient of it."""
    gathered: Tensor = _GatheredChannels.apply(own, link)
    return gathered


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
        raise RuntimeError(f"{link.ranks} tensor ranks cannot share samples of {length} tokens (--sequence-parallel)")
    return link.sum_scattered(part_BSH.reshape(samples * length, width)).view(samples, length // link.ranks, width)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BSH: Tensor, link: TensorLink) -> Tensor:
        ctx.link = link
        return hidden_BSH.view_as(hidden_BSH)

    @staticmethod
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor, None]:
        return ctx.link.summed(grad_BSH), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BSH: Tensor, link: TensorLink) -> Tensor:
        return link.summed(part_BSH)

    @staticmethod
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor, None]:
        return grad_BSH, None


class _GatheredTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, link: TensorLink) -> Tensor:
        ctx.link = link
        return gathered_tokens(own, link)

    @staticmethod
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor, None]:
        return own_tokens_of_sum(grad_BSH, ctx.link), None


class _ScatteredTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BSH: Tensor, link: TensorLink) -> Tensor:
        ctx.link = link
        return own_tokens_of_sum(part_BSH, link)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered_tokens(grad, ctx.link), None


class _GatheredChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, link: TensorLink) -> Tensor:
        ctx.link = link
        return link.gather(own).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.link.ranks, dim=-1)[ctx.link.rank], None
