"""Causal self-attention.

B micro-batch size, S tokens per sample, H hidden size, N query heads, K key and value heads, M = N / K query heads of a group,
D channels of a head, A = N D, X = A + 2 K D. If tensor ranks share the layer, N and K are the heads of one of them. If ranks share the
samples, S is a rank's tokens outside `mixed`; inside, a rank has all tokens and a part of the heads, until the product of the projection.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.attention_kernel import attend, queries_per_group
from megatron_zpp.model.blueprint import Blueprint
from megatron_zpp.model.chunks import recomputes_attention
from megatron_zpp.model.divisions import Role
from megatron_zpp.model.document_attention import Documents
from megatron_zpp.model.linear import make_linear
from megatron_zpp.model.norm import make_norm
from megatron_zpp.model.recompute import recomputed
from megatron_zpp.model.rotary import Rotation
from megatron_zpp.tensor_parallel.head_exchange import HeadExchange


class Attention(nn.Module):
    """Every token attends to itself and to the tokens before it; with `documents`, only to those of its own document.

    The rows of `qkv` are in Megatron's order: group by group, and within a group queries, key, value. So a group is a contiguous range of
    rows. See model/shapes.py.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        config, dtype = blueprint.config, blueprint.dtype
        self.head_channels = config.kv_channels
        self.queries_per_group = queries_per_group(config, blueprint.shape.tensor_ranks * blueprint.context_ranks)
        self.exchange = _head_exchange(blueprint)
        self.backend = config.attention_backend
        self.dropout = config.attention_dropout
        self.is_recomputed = recomputes_attention(config)
        self.qkv = make_linear(blueprint, Role.QKV)  # weight: [K (M + 2) D, H]
        self.query_norm = make_norm(config, config.kv_channels, dtype) if config.qk_layernorm else None
        self.key_norm = make_norm(config, config.kv_channels, dtype) if config.qk_layernorm else None
        product = F.linear if self.exchange is None else self.exchange.linear
        self.projection = make_linear(blueprint, Role.PROJECTION, product)  # weight: [H, N D]

    def forward(self, hidden_BSH: Tensor, documents: Documents | None = None, rotation: Rotation | None = None) -> Tensor:
        qkv_BSX = self.qkv(hidden_BSH)
        if self.exchange is not None:
            qkv_BSX = self.exchange.all_tokens(qkv_BSX)
        if self.is_recomputed:
            mixed_BSA = recomputed(self.mixed, qkv_BSX, documents, rotation, restores_generator=self.dropout > 0)
        else:
            mixed_BSA = self.mixed(qkv_BSX, documents, rotation)
        mixed_BSH: Tensor = self.projection(mixed_BSA)
        return mixed_BSH

    def mixed(self, qkv_BSX: Tensor, documents: Documents | None, rotation: Rotation | None) -> Tensor:
        """mixed_BSA: the part of attention between its two projections."""
        query_BNSD, key_BKSD, value_BKSD = self.heads(qkv_BSX, rotation)
        dropout = self.dropout if self.training else 0.0
        if documents is None:
            mixed_BNSD = attend(query_BNSD, key_BKSD, value_BKSD, dropout=dropout, backend=self.backend)
        else:
            mixed_BNSD = documents.attend(query_BNSD, key_BKSD, value_BKSD, dropout)
        return mixed_BNSD.transpose(1, 2).flatten(2)

    def heads(self, qkv_BSX: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """query_BNSD, key_BKSD and value_BKSD, normalized with --qk-layernorm, and rotated if there is a rotation."""
        groups = qkv_BSX.unflatten(-1, (-1, self.queries_per_group + 2, self.head_channels))  # [B, S, K, M + 2, D]
        query_BSKMD, key_BSK1D, value_BSK1D = groups.split((self.queries_per_group, 1, 1), dim=3)
        if self.query_norm is not None and self.key_norm is not None:
            query_BSKMD, key_BSK1D = self.query_norm(query_BSKMD), self.key_norm(key_BSK1D)
        if rotation is not None:
            query_BSKMD, key_BSK1D = rotation.turned(query_BSKMD), rotation.turned(key_BSK1D)
            value_BSK1D = value_BSK1D.contiguous()  # a view would keep the unrotated queries and keys alive
        query_BNSD, key_BKSD, value_BKSD = (part.flatten(2, 3).transpose(1, 2) for part in (query_BSKMD, key_BSK1D, value_BSK1D))
        return query_BNSD, key_BKSD, value_BKSD


def _head_exchange(blueprint: Blueprint) -> HeadExchange | None:
    """The exchange of the heads of one tensor rank; None if ranks have samples whole."""
    if blueprint.context is None:
        return None
    config, tensor_ranks = blueprint.config, blueprint.shape.tensor_ranks
    queries = queries_per_group(config, tensor_ranks)
    return HeadExchange(blueprint.context, config.num_attention_heads // (tensor_ranks * queries), queries, config.kv_channels)
