"""The exchange of tokens for heads, against slices of whole tensors: values, gradients, the order of sums, bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness.context_ranks import run_context_ranks
from harness.tensor_ranks import summed_in_order
from torch import Tensor

from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.tensor_parallel.head_exchange import HeadExchange

pytestmark = pytest.mark.virtual

SAMPLES, OWN, CHANNELS = 3, 2, 5
# context ranks, groups, queries of a group: whole groups to each rank, one to each, one to several
HEADS = [(2, 4, 1), (2, 2, 3), (2, 1, 4), (4, 2, 2), (4, 2, 4), (4, 1, 8), (3, 3, 2)]
heads = pytest.mark.parametrize("ranks, groups, queries", HEADS)
OUT = 7
Outcome = tuple[Tensor, ...]


def whole(ranks: int, groups: int, queries: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, S, K, M + 2, D]"""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((SAMPLES, ranks * OWN, groups, queries + 2, CHANNELS), generator=generator).to(dtype)


def heads_of(qkv: Tensor, rank: int, ranks: int) -> Tensor:
    """[B, S, groups, queries + 2, D] of one rank, by slicing."""
    groups, queries = qkv.shape[2], qkv.shape[3] - 2
    if groups >= ranks:
        return qkv.chunk(ranks, dim=2)[rank]
    holders = ranks // groups
    group, place = qkv[:, :, rank // holders], rank % holders
    own = group[:, :, place * queries // holders : (place + 1) * queries // holders]
    return torch.cat((own, group[:, :, queries:]), dim=2)[:, :, None]


def exchanged(link: ContextLink, groups: int, queries: int, dtype: torch.dtype, gradients: list[Tensor]) -> Outcome:
    """What the exchanges give a rank, and their gradients. gradients: of the heads that each rank has."""
    exchange = HeadExchange(link, groups, queries, CHANNELS)
    own = whole(link.ranks, groups, queries, dtype)[:, link.rank * OWN : (link.rank + 1) * OWN].flatten(2).requires_grad_()
    qkv = exchange.all_tokens(own)
    qkv.backward(gradients[link.rank].flatten(2))
    mixed = whole(link.ranks, groups, queries, dtype)[:, :, :, :queries].flatten(2, 3).chunk(link.ranks, dim=2)[link.rank]
    leaf = mixed.flatten(2).requires_grad_()
    weight, bias = (values.clone().requires_grad_() for values in weight_and_bias(groups * queries, dtype))
    back = exchange.linear(leaf, weight, bias)
    back.backward(2 * back.detach())
    found = (own.grad, leaf.grad, weight.grad, bias.grad)
    return qkv.detach(), back.detach(), *(gradient for gradient in found if gradient is not None)


def weight_and_bias(heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = torch.randn((OUT, heads * CHANNELS + 1), generator=torch.Generator().manual_seed(3)).to(dtype)
    return values[:, 1:].contiguous(), values[:, 0].contiguous()


@heads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rank_gets_its_heads_of_all_tokens_and_back_the_product_of_all_heads_of_its_tokens(
    ranks: int, groups: int, queries: int, dtype: torch.dtype
) -> None:
    qkv = whole(ranks, groups, queries, dtype)
    parts = [heads_of(qkv, rank, ranks) for rank in range(ranks)]
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(part.shape, generator=generator).to(dtype) for part in parts]
    weight, bias = weight_and_bias(groups * queries, dtype)
    owns = [part.flatten(2).contiguous() for part in qkv[:, :, :, :queries].chunk(ranks, dim=1)]
    products = [F.linear(own, weight, bias) for own in owns]
    of_inputs = torch.cat([(2 * product).view(-1, OUT).mm(weight).view(SAMPLES, OWN, -1) for product in products], dim=1)
    for rank, found in enumerate(run_context_ranks(ranks, lambda link: exchanged(link, groups, queries, dtype, gradients))):
        got, product, grad, of_heads, of_weight, of_bias = found
        assert torch.equal(got, parts[rank].flatten(2))
        assert torch.equal(grad, gradient_of(gradients, qkv).chunk(ranks, dim=1)[rank].flatten(2))
        assert torch.equal(product, products[rank])
        assert torch.equal(of_heads, of_inputs.chunk(ranks, dim=2)[rank])
        own_grad = (2 * product).view(-1, OUT)
        assert torch.equal(of_weight, own_grad.t() @ owns[rank].flatten(0, 1)) and torch.equal(of_bias, own_grad.sum(0))


def gradient_of(gradients: list[Tensor], qkv: Tensor) -> Tensor:
    """Of all heads and tokens: those of queries as they are, those of a key and a value added over the ranks that have it."""
    ranks, groups, queries = len(gradients), qkv.shape[2], qkv.shape[3] - 2
    if groups >= ranks:
        return torch.cat(gradients, dim=2)
    holders = ranks // groups
    of_groups = []
    for group in range(groups):
        of_holders = gradients[group * holders : (group + 1) * holders]
        own = [grad[:, :, :, : queries // holders] for grad in of_holders]
        of_groups.append(torch.cat([*own, summed_in_order([grad[:, :, :, queries // holders :] for grad in of_holders])], dim=3))
    return torch.cat(of_groups, dim=2)


@heads
def test_the_exchanges_take_the_bytes_of_own_heads_for_the_tokens_of_others(ranks: int, groups: int, queries: int) -> None:
    channels_of_rank = groups * queries // ranks, max(1, groups // ranks)
    qkv_width, mixed_width = (channels_of_rank[0] + 2 * channels_of_rank[1]) * CHANNELS, channels_of_rank[0] * CHANNELS

    def on_rank(link: ContextLink) -> tuple[Traffic, Traffic]:
        exchange = HeadExchange(link, groups, queries, CHANNELS)
        own = torch.zeros(SAMPLES, OWN, groups * (queries + 2) * CHANNELS, dtype=torch.bfloat16, requires_grad=True)
        weight, _ = weight_and_bias(groups * queries, torch.bfloat16)
        mixed = exchange.linear(exchange.all_tokens(own)[..., :mixed_width].contiguous(), weight, None)
        forward = link._ledger.total(Category.EXCHANGES)
        mixed.sum().backward()
        return forward, link._ledger.total(*Category)

    expected = (ranks - 1) * SAMPLES * OWN * (qkv_width + mixed_width) * 2
    for forward, both in run_context_ranks(ranks, on_rank):
        assert forward == Traffic(context_bytes=expected)
        assert both == Traffic(context_bytes=2 * expected)


def test_heads_that_the_ranks_cannot_share_are_refused() -> None:
    def on_rank(link: ContextLink) -> None:
        for groups, queries in ((3, 4), (1, 6), (2, 3)):
            with pytest.raises(RuntimeError, match=f"4 context ranks cannot share {groups} groups of {queries} query heads"):
                HeadExchange(link, groups, queries, CHANNELS)

    run_context_ranks(4, on_rank)
