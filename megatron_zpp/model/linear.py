"""The linear layers of the model, with the sizes that its shape says."""

from __future__ import annotations

import torch
from torch import nn

from megatron_zpp.model.divisions import RULES, Cut, Role
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.tensor_parallel.layers import ColumnLinear, RowLinear


def make_linear(shape: ModelShape, role: Role, dtype: torch.dtype, tensor: TensorParallel | None = None) -> nn.Linear:
    """The linear layer of a role, with the rank's part of its weight and of its bias if it has one. tensor: None if layers are whole."""
    rows, columns = shape.weight(role).local_shape
    has_bias = shape.bias(role) is not None
    if tensor is None:
        return nn.Linear(columns, rows, bias=has_bias, dtype=dtype)
    kind = RowLinear if RULES[role].weight is Cut.COLUMNS else ColumnLinear
    return kind(columns, rows, tensor, bias=has_bias, dtype=dtype)
