"""LayerNorm and RMSNorm, from torch, from NVIDIA Apex, or of our own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.ops.apex import apex_member
from megatron_zpp.ops.device_kind import kind_of

HAS_FUSED_RMS_NORM = hasattr(torch.ops.aten, "_fused_rms_norm")
APEX_NORMS = {"LayerNorm": "FusedLayerNorm", "RMSNorm": "FusedRMSNorm"}


def make_norm(config: ModelConfig, width: int, dtype: torch.dtype) -> nn.Module:
    """LayerNorm or RMSNorm over the last dim. Gain and bias have the model's dtype; statistics are fp32 inside the kernel.

    LayerNorm: (x - mean) / sqrt(variance + epsilon) gain + bias. RMSNorm: x / sqrt(mean of x^2 + epsilon) gain (arXiv 1910.07467).
    """
    if config.norm_backend == "apex":
        norm: nn.Module = apex_member("apex.normalization", APEX_NORMS[config.normalization])(width, eps=config.norm_epsilon)
        return norm.to(dtype)
    if config.normalization == "RMSNorm":
        kind = CentredRMSNorm if config.apply_layernorm_1p else RMSNorm
        return kind(width, eps=config.norm_epsilon, dtype=dtype)
    layer_norm = CentredLayerNorm if config.apply_layernorm_1p else nn.LayerNorm
    return layer_norm(width, eps=config.norm_epsilon, dtype=dtype)


class CentredLayerNorm(nn.LayerNorm):
    """LayerNorm whose weight is the gain minus 1, so its initial weight is 0."""

    def forward(self, values: Tensor) -> Tensor:
        return F.layer_norm(values, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Root mean square normalization with a gain and no bias."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.epsilon = eps

    def forward(self, values: Tensor) -> Tensor:
        return rms_norm(values, self.weight, self.epsilon)


class CentredRMSNorm(RMSNorm):
    """RMSNorm whose weight is the gain minus 1, so its initial weight is 0."""

    def forward(self, values: Tensor) -> Tensor:
        return rms_norm(values, self.weight + 1, self.epsilon)


def rms_norm(values: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """values / sqrt(mean of their squares + epsilon) * gain over the last dim, rounded once to the dtype of the values."""
    if kind_of(values.device.type) == "cuda" and HAS_FUSED_RMS_NORM:
        return F.rms_norm(values, gain.shape, gain, epsilon) if values.is_cuda else _planned_rms_norm(values, gain)
    normed: Tensor = _RMSNorm.apply(values, gain, epsilon)
    return normed


class _RMSNorm(torch.autograd.Function):
    """Keeps input, gain and one number per row for backward. Torch's own version without a fused kernel keeps fp32 copies as well.

    Its output is what an operation has made, not what a `.to` that changes nothing returns: torch 2.11 compiles a function with such an
    output to wrong gradients (https://github.com/pytorch/pytorch/issues/180642).
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        wide = values.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(values, gain, scale)
        normed = wide * scale * gain
        return normed if normed.dtype == values.dtype else normed.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        values, gain, scale = ctx.saved_tensors
        normed = values.float() * scale
        grad_normed = grad.float() * gain
        grad_values = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
        grad_gain = (grad.float() * normed).flatten(0, -2).sum(0)
        return grad_values.to(values.dtype), grad_gain.to(gain.dtype), None


class _PlannedRMSNorm(torch.autograd.Function):
    """What torch's fused kernel keeps and makes. On the meta device torch has its parts alone."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(values, gain, values.new_empty((*values.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(values, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        values, gain, _ = ctx.saved_tensors
        return torch.empty_like(values, memory_format=torch.contiguous_format), torch.empty_like(gain)


def _planned_rms_norm(values: Tensor, gain: Tensor) -> Tensor:
    normed: Tensor = _PlannedRMSNorm.apply(values, gain)
    return normed
