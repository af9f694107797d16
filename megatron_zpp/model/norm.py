"""The normalization of the hidden states."""

from __future__ import annotations

import torch
from torch import nn

from megatron_zpp.config.schema import ModelConfig


def hidden_norm(config: ModelConfig, dtype: torch.dtype) -> nn.LayerNorm:
    """A LayerNorm over the hidden dim; gain and bias have the model's dtype, statistics are fp32 inside the kernel."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon, dtype=dtype)
