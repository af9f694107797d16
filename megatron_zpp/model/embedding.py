"""Turns tokens, and learned positions if the model has them, into hidden states.

B micro-batch size, S tokens per sample, P positions, V padded vocabulary, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_zpp.model.divisions import Role
from megatron_zpp.model.randomness import UnitRandomness
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.ops.dropout import dropout


class Embedding(nn.Module):
    """Word embedding, plus a position embedding if positions are learned, then dropout. Without position ids, positions count from 0."""

    def __init__(self, shape: ModelShape, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        config = shape.config
        self.word = _table(shape, Role.WORD, dtype)  # weight: [V, H]
        self.position = _table(shape, Role.POSITION, dtype) if config.learns_positions else None  # weight: [P, H]
        self.dropout = config.hidden_dropout
        self.randomness = UnitRandomness(seed, unit_index=0)

    def forward(self, tokens_BS: Tensor, first_sample: int, position_ids_BS: Tensor | None = None) -> Tensor:
        hidden_BSH = self.word(tokens_BS)
        if self.position is not None:
            hidden_BSH = hidden_BSH + _learned_positions(self.position, tokens_BS.shape[1], position_ids_BS)
        if self.training and self.dropout > 0:
            (mask_start,) = self.randomness.mask_starts(1, first_sample, hidden_BSH)
            hidden_BSH = dropout(hidden_BSH, mask_start, self.dropout)
        return hidden_BSH


def _learned_positions(table: nn.Embedding, sample_length: int, position_ids_BS: Tensor | None) -> Tensor:
    """position_SH, or position_BSH if there are position ids."""
    if sample_length > table.num_embeddings:
        raise RuntimeError(f"a sample of {sample_length} tokens does not fit the model's {table.num_embeddings} positions")
    position_XSH: Tensor = table.weight[:sample_length] if position_ids_BS is None else table(position_ids_BS)
    return position_XSH


def _table(shape: ModelShape, role: Role, dtype: torch.dtype) -> nn.Embedding:
    # nn.Embedding's own constructor draws normal values; on the meta device that is useless and costs a second of imports.
    return nn.Embedding.from_pretrained(torch.empty(shape.weight(role).local_shape, dtype=dtype), freeze=False)
