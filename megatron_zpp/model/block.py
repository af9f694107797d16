"""One transformer block.

B micro-batch size, S tokens per sample, H hidden size. If ranks divide samples, S is the tokens of a sample divided by these ranks; with
sequence parallelism it is divided by the tensor ranks, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megatron_zpp.model.attention import Attention
from megatron_zpp.model.blueprint import Blueprint
from megatron_zpp.model.document_attention import Documents
from megatron_zpp.model.mlp import MLP
from megatron_zpp.model.norm import make_norm
from megatron_zpp.model.randomness import UnitRandomness
from megatron_zpp.model.rotary import Rotation
from megatron_zpp.ops.dropout import dropout


class Block(nn.Module):
    """Attention and MLP, each after a norm and inside a residual connection (pre-norm, as in GPT-2)."""

    def __init__(self, blueprint: Blueprint, block_index: int) -> None:
        super().__init__()
        config, dtype = blueprint.config, blueprint.dtype
        self.attention_norm = make_norm(config, config.hidden_size, dtype)
        self.attention = Attention(blueprint)
        self.mlp_norm = make_norm(config, config.hidden_size, dtype)
        self.mlp = MLP(blueprint)
        self.hidden_dropout, self.attention_dropout = config.hidden_dropout, config.attention_dropout
        self.randomness = UnitRandomness(blueprint.seed, block_index + 1, blueprint.tensor, blueprint.context)

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
