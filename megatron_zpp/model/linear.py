"""The linear layers of the model, with the sizes that its shape says."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from megatron_zpp.model.blueprint import Blueprint
from megatron_zpp.model.divisions import RULES, Cut, Role
from megatron_zpp.tensor_parallel.layers import ColumnLinear, Product, ProductLinear, RowLinear


def make_linear(blueprint: Blueprint, role: Role, product: Product = F.linear) -> nn.Linear:
    """The linear layer of a role, with the rank's part of its weight and of its bias if it has one.

    product: what multiplies, for a layer that is whole or ends a divided one.
    """
    shape, dtype, tensor = blueprint.shape, blueprint.dtype, blueprint.tensor
    rows, columns = shape.weight(role).local_shape
    has_bias = shape.bias(role) is not None
    if tensor is None:
        if product is not F.linear:
            return ProductLinear(columns, rows, product, bias=has_bias, dtype=dtype)
        return nn.Linear(columns, rows, bias=has_bias, dtype=dtype)
    if RULES[role].weight is Cut.COLUMNS:
        return RowLinear(columns, rows, tensor, bias=has_bias, dtype=dtype, product=product)
    return ColumnLinear(columns, rows, tensor, bias=has_bias, dtype=dtype)
