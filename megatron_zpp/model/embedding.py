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
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.tensor_parallel.regions import leave
from megatron_zpp.tensor_parallel.vocabulary import DividedTable


class Embedding(nn.Module):
    """Word embedding, plus a position embedding if positions are learned, then dropout. Without position ids, positions count from 0."""

    def __init__(self, shape: ModelShape, seed: int, dtype: torch.dtype, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        config = shape.config
        self.tensor = tensor
        self.word = _table(shape, Role.WORD, dtype, tensor)  # weight: [V, H]
        self.position = _table(shape, Role.POSITION, dtype, tensor) if config.learns_positions else None  # weight: [P, H]
        self.dropout = config.hidden_dropout
        self.randomness = UnitRandomness(seed, unit_index=0, tensor=tensor)

    def forward(self, tokens_BS: Tensor, first_sample: int, position_ids_BS: Tensor | None = None) -> Tensor:
        hidden_BSH = self.word(tokens_BS)
        if self.position is not None:
            hidden_BSH = hidden_BSH + _learned_positions(self.position, tokens_BS, position_ids_BS)
        if self.tensor is not None:
            hidden_BSH = leave(hidden_BSH, self.tensor)
        if self.training and self.dropout > 0:
            (mask_start,) = self.randomness.mask_starts(1, first_sample, hidden_BSH)
            hidden_BSH = dropout(hidden_BSH, mask_start, self.dropout)
        return hidden_BSH


def _learned_positions(table: nn.Embedding | DividedTable, tokens_BS: Tensor, position_ids_BS: Tensor | None) -> Tensor:
    """position_SH, or position_BSH if there are position ids; a rank's part of them if the table is divided."""
    sample_length = tokens_BS.shape[1]
    positions = table.divided.rows if isinstance(table, DividedTable) else table.num_embeddings
    if sample_length > positions:
        raise RuntimeError(f"a sample of {sample_length} tokens does not fit the model's {positions} positions")
    if position_ids_BS is None and not isinstance(table, DividedTable):
        return table.weight[:sample_length]
    ids = torch.arange(sample_length, device=tokens_BS.device) if position_ids_BS is None else position_ids_BS
    position_XSH: Tensor = table(ids)
    return position_XSH


def _table(shape: ModelShape, role: Role, dtype: torch.dtype, tensor: TensorParallel | None) -> nn.Embedding | DividedTable:
    rows, width = shape.weight(role).local_shape
    if tensor is not None:
        return DividedTable(rows, width, tensor.link, dtype=dtype)
    # nn.Embedding's own constructor draws normal values; on the meta device that is useless and costs a second of imports.
    return nn.Embedding.from_pretrained(torch.empty(rows, width, dtype=dtype), freeze=False)
