"""Turns hidden states into logits, and logits into a loss.

B micro-batch size, S tokens per sample, H hidden size, V padded vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.cross_entropy import token_loss
from megatron_zpp.model.divisions import Role
from megatron_zpp.model.linear import make_linear
from megatron_zpp.model.norm import make_norm
from megatron_zpp.model.shapes import ModelShape


class Final(nn.Module):
    """Final norm, output projection and loss; it has a head of its own only if the output is untied."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        config = shape.config
        self.norm = make_norm(config, config.hidden_size, dtype)
        if config.untie_embeddings_and_output_weights:
            self.head = make_linear(shape, Role.HEAD, dtype)  # weight: [V, H]

    def forward(self, hidden_BSH: Tensor, tied_weight_VH: Tensor | None, labels_BS: Tensor | None) -> Tensor:
        """loss_BS in fp32, or logits_BSV in the model's dtype if there are no labels.

        tied_weight_VH: the word embedding's parameter, passed at every call so that it is registered once; None if the output is untied.
        """
        normed_BSH = self.norm(hidden_BSH)
        logits_BSV = self.head(normed_BSH) if tied_weight_VH is None else F.linear(normed_BSH, tied_weight_VH)
        return logits_BSV if labels_BS is None else token_loss(logits_BSV, labels_BS)
