"""The feed-forward half of a block.

B micro-batch size, S tokens per sample, H hidden size, F feed-forward hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.config.schema import ModelConfig


class MLP(nn.Module):
    """Linear, GELU, linear; the GELU is the tanh form of GPT-2 and of Megatron's fused kernel."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.ffn_hidden_size, dtype=dtype)  # weight: [F, H]
        self.down = nn.Linear(config.ffn_hidden_size, config.hidden_size, dtype=dtype)  # weight: [H, F]

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden_BSH), approximate="tanh"))
