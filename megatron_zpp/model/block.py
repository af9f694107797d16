"""One transformer block.

B micro-batch size, S tokens per sample, H hidden size. If ranks divide samples, S is the tokens of a sample divided by these ranks; with
sequence parallelism it is divided by the tensor ranks, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.model.attention import Attention
from megatron_zpp.model.document_attention import Documents
from megatron_zpp.model.mlp import MLP
from megatron_zpp.model.norm import make_norm
from megatron_zpp.model.randomness import UnitRandomness
from megatron_zpp.model.rotary import Rotation
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.ops.dropout import dropout
from megatron_zpp.tensor_parallel.context import TensorParallel


class Block(nn.Module):
    """Attention and MLP, each after a norm and inside a residual connection (pre-norm, as in GPT-2)."""

    def __init__(
        self,
        shape: ModelShape,
        block_index: int,
        seed: int,
        dtype: torch.dtype,
        tensor: TensorParallel | None = None,
        context: ContextLink | None = None,
    ) -> None:
        super().__init__()
        config = shape.config
        self.attention_norm = make_norm(config, config.hidden_size, dtype)
        self.attention = Attention(shape, dtype, tensor, context)
        self.mlp_norm = make_norm(config, config.hidden_size, dtype)
        self.mlp = MLP(shape, dtype, tensor)
        self.hidden_dropout, self.attention_dropout = config.hidden_dropout, config.attention_dropout
        self.randomness = UnitRandomness(seed, unit_index=block_index + 1, tensor=tensor, context=context)

    def forward(
        self, hidden_BSH: Tensor, first_sample: int, documents: Documents | None = None, rotation: Rotation | None = None
    ) -> Tensor:
        drops, draws = self.training and self.hidden_dropout > 0, self.training and self.attention_dropout > 0
        mask_starts = self.randomness.mask_starts(2, first_sample, hidden_BSH) if drops else (None, None)
        with self.randomness.scope(is_needed=draws, first_sample=first_sample, device=hidden_BSH.device):
            return self.transformed(hidden_BSH, mask_starts, documents, rotation)

    def transformed(
        self, hidden_BSH: Tensor, mask_starts: Sequence[Tensor | None], documents: Documents | None, rotation: Rotation | None
    ) -> Tensor:
        """The block's output. It reads only what all blocks share, weights and tensors; so one compilation serves every block.

        mask_starts: of dropout after attention and after the MLP; None: nothing is dropped there.
        """
        after_attention, after_mlp = mask_starts
        mixed_BSH = self.attention(self.attention_norm(hidden_BSH), documents, rotation)
        hidden_BSH = hidden_BSH + self.dropped(mixed_BSH, after_attention)
        return hidden_BSH + self.dropped(self.mlp(self.mlp_norm(hidden_BSH)), after_mlp)

    def dropped(self, values_BSH: Tensor, mask_start: Tensor | None) -> Tensor:
        return values_BSH if mask_start is None else dropout(values_BSH, mask_start, self.hidden_dropout)
