"""One transformer block.

B micro-batch size, S tokens per sample, H hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.attention import Attention
from megatron_zpp.model.document_attention import Documents
from megatron_zpp.model.mlp import MLP
from megatron_zpp.model.norm import make_norm
from megatron_zpp.model.randomness import UnitRandomness
from megatron_zpp.model.rotary import Rotation
from megatron_zpp.model.shapes import ModelShape


class Block(nn.Module):
    """Attention and MLP, each after a norm and inside a residual connection (pre-norm, as in GPT-2)."""

    def __init__(self, shape: ModelShape, block_index: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        config = shape.config
        self.attention_norm = make_norm(config, config.hidden_size, dtype)
        self.attention = Attention(shape, dtype)
        self.mlp_norm = make_norm(config, config.hidden_size, dtype)
        self.mlp = MLP(shape, dtype)
        self.dropout = config.hidden_dropout
        has_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0
        self.randomness = UnitRandomness(seed, unit_index=block_index + 1, has_dropout=has_dropout)

    def forward(
        self, hidden_BSH: Tensor, first_sample: int, documents: Documents | None = None, rotation: Rotation | None = None
    ) -> Tensor:
        with self.randomness.scope(training=self.training, first_sample=first_sample, device=hidden_BSH.device):
            return self.transformed(hidden_BSH, documents, rotation)

    def transformed(self, hidden_BSH: Tensor, documents: Documents | None, rotation: Rotation | None) -> Tensor:
        """The block's output. It reads only what all blocks share, and weights; so one compilation serves every block."""
        mixed_BSH = self.attention(self.attention_norm(hidden_BSH), documents, rotation)
        hidden_BSH = hidden_BSH + F.dropout(mixed_BSH, self.dropout, self.training)
        return hidden_BSH + F.dropout(self.mlp(self.mlp_norm(hidden_BSH)), self.dropout, self.training)
