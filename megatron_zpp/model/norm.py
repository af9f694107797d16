"""The normalization of the hidden states."""

from __future__ import annotations

import torch
from torch import nn

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.ops.apex import apex_member


def hidden_norm(config: ModelConfig, dtype: torch.dtype) -> nn.Module:
    """A LayerNorm over the hidden dim; gain and bias have the model's dtype, statistics are fp32 inside the kernel."""
    if config.norm_backend == "apex":
        norm: nn.Module = apex_member("apex.normalization", "FusedLayerNorm")(config.hidden_size, eps=config.norm_epsilon)
        return norm.to(dtype)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon, dtype=dtype)
