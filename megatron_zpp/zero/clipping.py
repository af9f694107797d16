"""Decides from the gradient norm whether a step is skipped and how its gradient is clipped, on the device: the host need not wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class Decision:
    """grad_norm: [] fp64, before clipping. factor: [] fp64, unscales the gradient and clips it.

    skips: [] fp32, 1 if the step is skipped for a NaN or inf in the gradient, else 0.
    """

    grad_norm: Tensor
    factor: Tensor
    skips: Tensor


def decide(scaled_norm: Tensor, *, scale: float, clip_grad: float) -> Decision:
    """scaled_norm: [] fp64, of the gradient times the loss scale. clip_grad: largest norm, 0 for no clipping."""
    grad_norm = scaled_norm / scale
    factor = torch.ones_like(grad_norm)
    if clip_grad > 0:
        factor = (torch.full_like(grad_norm, clip_grad) / (grad_norm + _CLIP_EPSILON)).clamp(max=1.0)
    return Decision(grad_norm, factor / scale, grad_norm.isfinite().logical_not().float())
