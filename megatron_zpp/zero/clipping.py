"""Decides from the gradient norm whether a step is skipped and how its gradient is clipped: on the host, and on the device, which needs
not wait for the host.

Both start from the square of the norm. Only the host's root is correctly rounded everywhere; torch's differs in the last bit on some CPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class Clipping:
    """scale: the loss scale, which the gradient still contains. clip_grad: the largest gradient norm, 0 for no clipping."""

    scale: float
    clip_grad: float

    def norm(self, squared_norm: float) -> float:
        """The gradient norm before clipping. A step is skipped if it is not finite."""
        return math.sqrt(squared_norm) / self.scale

    def factor(self, squared_norm: float) -> float:
        """Unscales the gradient and clips it."""
        factor = self.clip_grad / (self.norm(squared_norm) + _CLIP_EPSILON)
        return (factor if 0 < factor < 1 else 1.0) / self.scale

    def factor_on_device(self, squared_norm: Tensor) -> Tensor:
        """The same factor, [] fp32; squared_norm: [] fp64. Undefined if the step is skipped."""
        if self.clip_grad == 0:
            return torch.full_like(squared_norm, 1.0 / self.scale, dtype=torch.float32)
        norm = squared_norm.sqrt() / self.scale
        return ((self.clip_grad / (norm + _CLIP_EPSILON)).clamp(max=1.0) / self.scale).float()


def skips_on_device(squared_norm: Tensor) -> Tensor:
    """[] fp32: 1 if a NaN or inf in the gradient makes the ranks skip the step, else 0."""
    return squared_norm.isfinite().logical_not().float()
