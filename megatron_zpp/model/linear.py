"""The linear layers of the model, with the sizes that its shape says."""

from __future__ import annotations

import torch
from torch import nn

from megatron_zpp.model.divisions import Role
from megatron_zpp.model.shapes import ModelShape


def make_linear(shape: ModelShape, role: Role, dtype: torch.dtype) -> nn.Linear:
    """The linear layer of a role, with the rank's part of its weight and of its bias if it has one."""
    rows, columns = shape.weight(role).local_shape
    return nn.Linear(columns, rows, bias=shape.bias(role) is not None, dtype=dtype)
