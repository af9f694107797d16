"""Turns hidden states into logits, and logits into a loss.

B micro-batch size, S tokens per sample, H hidden size, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.blueprint import Blueprint
from megatron_zpp.model.divisions import Role
from megatron_zpp.model.linear import make_linear
from megatron_zpp.model.loss import head_loss
from megatron_zpp.model.norm import make_norm
from megatron_zpp.tensor_parallel.regions import enter, gathered_channels
from megatron_zpp.tensor_parallel.vocabulary import DividedRows


class Final(nn.Module):
    """Final norm, output projection and loss; it has a head of its own only if the output is untied."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        config = blueprint.config
        self.tensor = blueprint.tensor
        self.loss_chunk_tokens = config.loss_chunk_tokens
        self.norm = make_norm(config, config.hidden_size, blueprint.dtype)
        if config.untie_embeddings_and_output_weights:
            self.head = make_linear(replace(blueprint, tensor=None), Role.HEAD)  # only its weight is used: [V, H]

    def forward(self, hidden_BSH: Tensor, tied_weight_VH: Tensor | None, labels_BS: Tensor | None) -> Tensor:
        """loss_BS in fp32, or logits_BSV in the model's dtype if there are no labels.

        tied_weight_VH: the word embedding's parameter, passed at every call so that it is registered once; None if the output is untied.
        """
        normed_BSH = self.norm(hidden_BSH)
        weight_VH = self.head.weight if tied_weight_VH is None else tied_weight_VH
        if self.tensor is not None:
            normed_BSH = enter(normed_BSH, self.tensor)
        if labels_BS is not None:
            divided = None if self.tensor is None else DividedRows(weight_VH.shape[0], self.tensor.link)
            return head_loss(normed_BSH, weight_VH, labels_BS, self.loss_chunk_tokens, divided)
        logits_BSV = F.linear(normed_BSH, weight_VH)
        return logits_BSV if self.tensor is None else gathered_channels(logits_BSV, self.tensor.link)
