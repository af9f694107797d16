"""Turns tokens, and learned positions if the model has them, into hidden states.

B micro-batch size, S tokens per sample, P positions, V padded vocabulary, H hidden size. If ranks divide samples, each has Q of the S
tokens; otherwise Q is S.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_zpp.model.blueprint import Blueprint
from megatron_zpp.model.divisions import Role
from megatron_zpp.model.randomness import UnitRandomness
from megatron_zpp.ops.dropout import dropout
from megatron_zpp.tensor_parallel.regions import leave
from megatron_zpp.tensor_parallel.vocabulary import DividedTable


class Embedding(nn.Module):
    """Word embedding, plus a position embedding if positions are learned, then dropout. Without position ids, positions count from 0."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        config, tensor, context = blueprint.config, blueprint.tensor, blueprint.context
        self.tensor = tensor
        self.token_parts, self.own_token_part = (1, 0) if context is None else (context.ranks, context.rank)
        self.word = _table(blueprint, Role.WORD)  # weight: [V, H]
        self.position = _table(blueprint, Role.POSITION) if config.learns_positions else None  # weight: [P, H]
        self.dropout = config.hidden_dropout
        self.randomness = UnitRandomness(blueprint.seed, 0, tensor, context)

    def forward(self, tokens_BQ: Tensor, first_sample: int, position_ids_BS: Tensor | None = None) -> Tensor:
        hidden_BQH = self.word(tokens_BQ)
        if self.position is not None:
            own_length = tokens_BQ.shape[1]
            hidden_BQH = hidden_BQH + self._learned_positions(self.position, own_length, position_ids_BS)
        if self.tensor is not None:
            hidden_BQH = leave(hidden_BQH, self.tensor)
        if self.training and self.dropout > 0:
            (mask_start,) = self.randomness.mask_starts(1, first_sample, hidden_BQH)
            hidden_BQH = dropout(hidden_BQH, mask_start, self.dropout)
        return hidden_BQH

    def _learned_positions(self, table: nn.Embedding | DividedTable, own_length: int, position_ids_BS: Tensor | None) -> Tensor:
        """position_QH, or position_BQH if there are position ids; a rank's part of them if the table is divided."""
        sample_length, first = own_length * self.token_parts, own_length * self.own_token_part
        positions = table.divided.rows if isinstance(table, DividedTable) else table.num_embeddings
        if sample_length > positions:
            raise RuntimeError(f"a sample of {sample_length} tokens does not fit the model's {positions} positions")
        own = slice(first, first + own_length)
        if position_ids_BS is None and not isinstance(table, DividedTable):
            return table.weight[own]
        ids = torch.arange(own.start, own.stop, device=table.weight.device) if position_ids_BS is None else position_ids_BS[:, own]
        position_XQH: Tensor = table(ids)
        return position_XQH


def _table(blueprint: Blueprint, role: Role) -> nn.Embedding | DividedTable:
    rows, width = blueprint.shape.weight(role).local_shape
    if blueprint.tensor is not None:
        return DividedTable(rows, width, blueprint.tensor.link, dtype=blueprint.dtype)
    # nn.Embedding's own constructor draws normal values; on the meta device that is useless and costs a second of imports.
    return nn.Embedding.from_pretrained(torch.empty(rows, width, dtype=blueprint.dtype), freeze=False)
