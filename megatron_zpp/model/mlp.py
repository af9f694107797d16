"""The feed-forward half of a block.

B micro-batch size, S tokens per sample, H hidden size, F feed-forward hidden size, or one tensor rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.blueprint import Blueprint
from megatron_zpp.model.divisions import Role
from megatron_zpp.model.linear import make_linear
from megatron_zpp.model.shapes import up_role


class MLP(nn.Module):
    """Linear, activation, linear. The activation is GELU, squared ReLU, or SwiGLU; for SwiGLU `up` has twice the rows."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.activation = activation_of(blueprint.config)
        self.up = make_linear(blueprint, up_role(blueprint.config))  # weight: [F, H] or [2 F, H]
        self.down = make_linear(blueprint, Role.DOWN)  # weight: [H, F]

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        return self.down(self.activation(self.up(hidden_BSH)))


def activation_of(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The activation function between the two linear layers."""
    if config.swiglu:
        return gated_silu
    gelu = F.gelu if config.has_exact_gelu else tanh_gelu
    return squared_relu if config.squared_relu else gelu


def tanh_gelu(inner_BSF: Tensor) -> Tensor:
    """GELU in the tanh form of GPT-2 and of Megatron's fused kernel."""
    return F.gelu(inner_BSF, approximate="tanh")


def squared_relu(inner_BSF: Tensor) -> Tensor:
    """max(x, 0)^2 (Primer, arXiv 2109.08668)."""
    return F.relu(inner_BSF).square()


def gated_silu(gate_and_value: Tensor) -> Tensor:
    """SiLU(gate) x value, [..., F] from [..., 2 F]: SwiGLU (arXiv 2002.05202)."""
    gated: Tensor = _GatedSilu.apply(gate_and_value)
    return gated


class _GatedSilu(torch.autograd.Function):
    """Keeps only its input for backward. Autograd would keep SiLU(gate) too, which is half as much again."""

    @staticmethod
    def forward(ctx: Any, gate_and_value: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_value)
        gate, value = gate_and_value.chunk(2, dim=-1)
        return F.silu(gate) * value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_and_value,) = ctx.saved_tensors
        gate, value = gate_and_value.chunk(2, dim=-1)
        return torch.cat((torch.ops.aten.silu_backward(grad * value, gate), grad * F.silu(gate)), dim=-1)
