"""Causal self-attention.

B micro-batch size, S tokens per sample, H hidden size, N heads, D channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputes_attention
from megatron_zpp.model.document_attention import Documents
from megatron_zpp.model.recompute import recomputed


class Attention(nn.Module):
    """Every token attends to itself and to the tokens before it, with `documents` to those of its document alone.

    The rows of `qkv` are ordered as Megatron orders them, head by head and q, k, v within a head: a run of rows is a set of whole heads.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        heads_width = config.num_attention_heads * config.kv_channels
        self.head_channels = config.kv_channels
        self.dropout = config.attention_dropout
        self.is_recomputed = recomputes_attention(config)
        self.qkv = nn.Linear(config.hidden_size, 3 * heads_width, dtype=dtype)  # weight: [N * 3 * D, H]
        self.projection = nn.Linear(heads_width, config.hidden_size, dtype=dtype)  # weight: [H, N * D]

    def forward(self, hidden_BSH: Tensor, documents: Documents | None = None) -> Tensor:
        qkv_BSA = self.qkv(hidden_BSH)
        if self.is_recomputed:
            return self.projection(recomputed(self._mixed, qkv_BSA, documents, restores_generator=self.dropout > 0))
        return self.projection(self._mixed(qkv_BSA, documents))

    def _mixed(self, qkv_BSA: Tensor, documents: Documents | None) -> Tensor:
        """What lies between the projections: [B, S, N * D]."""
        qkv_BSN3D = qkv_BSA.unflatten(-1, (-1, 3, self.head_channels))
        query_BNSD, key_BNSD, value_BNSD = qkv_BSN3D.permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        if documents is None:
            mixed_BNSD = F.scaled_dot_product_attention(query_BNSD, key_BNSD, value_BNSD, dropout_p=dropout, is_causal=True)
        else:
            mixed_BNSD = documents.attend(query_BNSD, key_BNSD, value_BNSD, dropout)
        return mixed_BNSD.transpose(1, 2).flatten(2)
