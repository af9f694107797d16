"""Words and positions become hidden states.

B micro-batch size, S tokens per sample, P positions, V padded vocabulary, H hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.randomness import UnitRandomness


class Embedding(nn.Module):
    """Word embedding plus learned absolute position embedding, then dropout. Without position ids, positions count from 0."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.word = _table(padded_vocab_size, config.hidden_size, dtype)  # weight: [V, H]
        self.position = _table(config.max_position_embeddings, config.hidden_size, dtype)  # weight: [P, H]
        self.dropout = config.hidden_dropout
        self.randomness = UnitRandomness(seed, unit_index=0, has_dropout=config.hidden_dropout > 0)

    def forward(self, tokens_BS: Tensor, first_sample: int, position_ids_BS: Tensor | None = None) -> Tensor:
        sample_length, positions = tokens_BS.shape[1], self.position.num_embeddings
        if sample_length > positions:
            raise RuntimeError(f"a sample of {sample_length} tokens does not fit the model's {positions} positions")
        position_XSH = self.position.weight[:sample_length] if position_ids_BS is None else self.position(position_ids_BS)
        hidden_BSH = self.word(tokens_BS) + position_XSH
        with self.randomness.scope(training=self.training, first_sample=first_sample, device=hidden_BSH.device):
            return F.dropout(hidden_BSH, self.dropout, self.training)


def _table(rows: int, columns: int, dtype: torch.dtype) -> nn.Embedding:
    # nn.Embedding's own constructor draws normal values, which on the meta device costs a second of imports and is of no use.
    return nn.Embedding.from_pretrained(torch.empty(rows, columns, dtype=dtype), freeze=False)
