"""Turns hidden states into logits, and logits into a loss.

B micro-batch size, S tokens per sample, H hidden size, V padded vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.head_loss import head_loss
from megatron_zpp.model.norm import make_norm


class Final(nn.Module):
    """Final norm, output projection and loss; it has a head of its own only if the output is untied."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.loss_chunk_tokens = config.loss_chunk_tokens
        self.norm = make_norm(config, config.hidden_size, dtype)
        if config.untie_embeddings_and_output_weights:
            self.head = nn.Linear(config.hidden_size, padded_vocab_size, bias=False, dtype=dtype)  # weight: [V, H]

    def forward(self, hidden_BSH: Tensor, tied_weight_VH: Tensor | None, labels_BS: Tensor | None) -> Tensor:
        """loss_BS in fp32, or logits_BSV in the model's dtype if there are no labels.

        tied_weight_VH: the word embedding's parameter, passed at every call so that it is registered once; None if the output is untied.
        """
        normed_BSH = self.norm(hidden_BSH)
        weight_VH = self.head.weight if tied_weight_VH is None else tied_weight_VH
        if labels_BS is None:
            return F.linear(normed_BSH, weight_VH)
        return head_loss(normed_BSH, weight_VH, labels_BS, self.loss_chunk_tokens)
