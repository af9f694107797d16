"""Exchanges tokens for heads before attention, and heads for tokens after it ("Ulysses", Jacobs et al., arXiv 2309.14509).

Between attentions a rank has its own tokens of each sample, and all heads. Inside attention it has all tokens, and some of the heads. With
C = 2 ranks that divide samples of 8 tokens, and 4 heads:

    rank 0    tokens 0 to 3, heads 0 to 3    <-->    tokens 0 to 7, heads 0 and 1
    rank 1    tokens 4 to 7, heads 0 to 3    <-->    tokens 0 to 7, heads 2 and 3

Queries, keys and values cross in one message. If there are fewer groups than ranks, several ranks have queries of one group, and each gets
the group's key and value; in backward the gradients of these are added in fp32, in the order of the ranks, and rounded once.

B micro-batch size, S tokens per sample, C context ranks, Q = S / C own tokens per sample, N query heads and K groups of the tensor rank,
D channels of a head. Per token there are X = (N + 2 K) D values before the exchange, and Y = (N / C + 2 max(K / C, 1)) D after it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.comm.group_link import Pending
from megatron_zpp.comm.tensor_link import add_in_order
from megatron_zpp.tensor_parallel.regions import region


class HeadExchange:
    """The exchanges of one attention layer. All ranks of the link must call it alike.

    groups: K, each of `queries` query heads and one key and one value head of `channels` channels.
    Raises RuntimeError if the ranks cannot share the heads.
    """

    def __init__(self, link: ContextLink, groups: int, queries: int, channels: int) -> None:
        self._link = link
        self._groups = groups
        self._channels = channels
        self._holders = max(1, link.ranks // groups)  # ranks that have queries of one group
        self._own_queries = queries // self._holders  # of one group, on one of them
        if (groups * self._holders) % link.ranks or queries % self._holders:
            raise RuntimeError(f"{link.ranks} context ranks cannot share {groups} groups of {queries} query heads")

    def all_tokens(self, qkv_BQX: Tensor) -> Tensor:
        """qkv_BSY: the queries, keys and values of all tokens, of this rank's heads, in groups like those of all heads."""
        return region(
            qkv_BQX,
            lambda own_BQX: joined_tokens(self._link.exchange(self._of_ranks(own_BQX))),
            lambda grad_BSY: self._summed(self._link.exchange(self._divided_tokens(grad_BSY))),
        )

    def linear(self, mixed_BSA: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear of the outputs of all heads for this rank's tokens. mixed_BSA: the outputs of its heads for all tokens."""
        product: Tensor = _LinearOfOwnTokens.apply(mixed_BSA, weight, bias, self)
        return product

    def own_tokens(self, mixed_BSA: Tensor) -> Tensor:
        """[B, Q, C A]: the outputs of all heads for this rank's tokens. Not differentiable; `linear` is."""
        return self._link.exchange(self._divided_tokens(mixed_BSA)).movedim(0, 2).flatten(2)

    def start_own_heads(self, grad_BQA: Tensor) -> Pending:
        """Starts the way back of `own_tokens`, for a gradient: `joined_tokens` of the result has this rank's heads, for all tokens."""
        return self._link.start_exchange(grad_BQA.unflatten(-1, (self._link.ranks, -1)).movedim(2, 0))

    def _of_ranks(self, own_BQX: Tensor) -> Tensor:
        """[C, B, Q, Y]: what each rank needs of the own tokens."""
        if self._holders == 1:
            return own_BQX.unflatten(-1, (self._link.ranks, -1)).movedim(2, 0)
        query, key_value = self._of_groups(own_BQX)
        key_value = key_value[:, :, :, None].expand(*query.shape[:4], *key_value.shape[3:])
        return torch.cat((query, key_value), dim=4).flatten(4).flatten(2, 3).movedim(2, 0)

    def _summed(self, grads_CBQY: Tensor) -> Tensor:
        """[B, Q, X]: the gradient for the own tokens, from the gradients of all ranks for them."""
        if self._holders == 1:
            return grads_CBQY.movedim(0, 2).flatten(2)
        grads = grads_CBQY.unflatten(0, (self._groups, self._holders)).unflatten(-1, (-1, self._channels))  # [K, holders, B, Q, heads, D]
        own = grads.shape[4] - 2
        key_value = grads[..., own:, :].movedim(1, 0).contiguous()  # [holders, K, B, Q, 2, D]
        total = torch.empty_like(key_value[0])
        add_in_order(key_value.flatten(1), total.view(-1))
        query = grads[..., :own, :].movedim(1, 3).flatten(3, 4)  # [K, B, Q, queries, D]
        return torch.cat((query, total), dim=3).movedim(0, 2).flatten(2)

    def _of_groups(self, own_BQX: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, Q, K, holders, own queries, D], and keys and values [B, Q, K, 2, D]."""
        groups = own_BQX.unflatten(-1, (self._groups, -1, self._channels))
        query, key_value = groups.tensor_split((-2,), dim=3)
        return query.unflatten(3, (self._holders, self._own_queries)), key_value

    def _divided_tokens(self, values_BSV: Tensor) -> Tensor:
        """[C, B, Q, V]: the tokens of each rank."""
        return values_BSV.unflatten(1, (self._link.ranks, -1)).movedim(1, 0)


class _LinearOfOwnTokens(torch.autograd.Function):
    """Exchange and product in one, because backward exchanges the gradient of the input beside the product that makes the weight's.

    Keeps the input of the product, and the parameter itself, whose storage may be freed between forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, mixed_BSA: Tensor, weight: Tensor, bias: Tensor | None, exchange: HeadExchange) -> Tensor:
        own_BQA = exchange.own_tokens(mixed_BSA)
        ctx.save_for_backward(own_BQA, weight)
        ctx.exchange = exchange
        return F.linear(own_BQA, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BQN: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        own_BQA, weight = ctx.saved_tensors
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_XN = grad_BQN.reshape(-1, grad_BQN.shape[-1])
        exchanging = ctx.exchange.start_own_heads((grad_XN @ weight).view(own_BQA.shape))
        grad_weight = grad_XN.t() @ own_BQA.reshape(-1, own_BQA.shape[-1]) if needs_weight else None
        grad_bias = grad_XN.sum(0) if needs_bias else None
        return joined_tokens(exchanging.wait()), grad_weight, grad_bias, None


def joined_tokens(parts_CBQV: Tensor) -> Tensor:
    """[B, S, V], from the tokens of all ranks; without a copy if B is 1."""
    return parts_CBQV.movedim(0, 1).flatten(1, 2)
