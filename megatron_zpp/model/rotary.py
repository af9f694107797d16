"""Rotary position embedding: rotates queries and keys by angles that grow with the position (RoFormer, arXiv 2104.09864).

B micro-batch size, S tokens per sample, R channels of a head that rotate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig


class Rotation(NamedTuple):
    """The angles of one micro-batch, for all blocks. Shapes: [S, 1, 1, R], or [B, S, 1, 1, R] if samples differ in their positions."""

    cos: Tensor
    sin: Tensor  # negative at the first channel of every pair
    is_interleaved: bool

    def turned(self, heads: Tensor) -> Tensor:
        """heads [B, S, K, M, D] with the first R channels rotated, in their dtype: (a, b) -> (a cos - b sin, b cos + a sin)."""
        turning, still = heads.tensor_split((self.cos.shape[-1],), dim=-1)
        turned = torch.addcmul(turning * self.cos, self._partners(turning), self.sin)
        return turned if still.shape[-1] == 0 else torch.cat((turned, still), dim=-1)

    def _partners(self, turning: Tensor) -> Tensor:
        if self.is_interleaved:
            return turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return turning.roll(turning.shape[-1] // 2, dims=-1)


@dataclass(frozen=True)
class RotaryPositions:
    """Computes the angles of positions."""

    config: ModelConfig

    def of_samples(self, length: int, position_ids_BS: Tensor | None, like: Tensor) -> Rotation:
        """The rotation for samples of `length` tokens, whose positions count from 0 unless there are position ids. like: hidden states."""
        positions = torch.arange(length, device=like.device) if position_ids_BS is None else position_ids_BS
        return self.rotation(positions, like.dtype)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation at `positions` [S] or [B, S]. Angles are fp32; their cosines and sines have `dtype`, the dtype of the heads."""
        steps = positions.float() / self.config.rotary_seq_len_interpolation_factor
        angles = steps[..., None] * self.frequencies(positions.device)  # [..., S, R / 2]
        cos, sin = angles.cos(), angles.sin()
        if self.config.rotary_interleaved:
            cos, sin = torch.stack((cos, cos), dim=-1).flatten(-2), torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Rotation(cos.to(dtype)[..., None, None, :], sin.to(dtype)[..., None, None, :], self.config.rotary_interleaved)

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per position for every pair of channels: [R / 2] fp32, falling from 1 to about 1 / base."""
        channels = self.config.rotary_channels
        exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
        frequencies = 1.0 / self.config.rotary_base**exponents
        return self._stretched(frequencies) if self.config.use_rope_scaling else frequencies

    def are_frequencies(self, stored: Tensor) -> bool:
        """Whether another program's tensor has these frequencies: as they are here, or before the scaling, as some programs save them.

        The tolerance is that of a model that was in 16 bits for a time, whatever its file has: rounded to bf16 twice, by 2^-8 each, and to
        fp16 below its normal numbers. Another base differs by far more.
        """
        if not stored.is_floating_point() or stored.shape != (self.config.rotary_channels // 2,):
            return False
        unscaled = RotaryPositions(replace(self.config, use_rope_scaling=False)).frequencies(stored.device)
        scaled = self.frequencies(stored.device) / self.config.rotary_seq_len_interpolation_factor
        bf16, fp16 = torch.finfo(torch.bfloat16), torch.finfo(torch.float16)
        relative, absolute = bf16.eps, fp16.smallest_normal * fp16.eps
        return any(torch.allclose(stored.double(), wanted.double(), rtol=relative, atol=absolute) for wanted in (unscaled, scaled))

    def _stretched(self, frequencies: Tensor) -> Tensor:
        """Frequencies under Llama 3.1's scaling. Waves longer than original / low are slowed by the factor.

        Waves shorter than original / high stay as they are. In between, the share of the original frequency grows linearly with the
        number of waves in the original context.
        """
        config = self.config
        low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
        waves_in_context = config.rope_scaling_original_max_position_embeddings * frequencies / (2 * math.pi)
        share = ((waves_in_context - low) / (high - low)).clamp(0.0, 1.0)
        return share * frequencies + (1.0 - share) * frequencies / config.rope_scaling_factor
