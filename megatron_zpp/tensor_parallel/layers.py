"""Linear layers that tensor ranks share.

ColumnLinear    a rank has some rows of the weight [n, m], so some channels of the output: "column parallel" in Megatron-LM, whose
                weights are transposed. It begins a divided layer.
RowLinear       a rank has some columns, for its channels of the input; the ranks' outputs are added. It ends a divided layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.tensor_parallel.regions import gathered_tokens, joined, leave

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # like F.linear


class ColumnLinear(nn.Linear):
    """The rank's channels of the output for all tokens, [B, S, n / T], from what the rank has between the layers."""

    def __init__(self, in_features: int, own_features: int, tensor: TensorParallel, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, own_features, bias=bias, dtype=dtype)
        self.tensor = tensor

    def forward(self, hidden: Tensor) -> Tensor:
        own_channels: Tensor = _ColumnLinear.apply(hidden, self.weight, self.bias, self.tensor)
        return own_channels


class RowLinear(nn.Linear):
    """The sum of all ranks' outputs, as a rank has it between the layers, and then the bias once: [B, S, n] or [B, S / T, n].

    product: what multiplies.
    """

    def __init__(
        self,
        own_features: int,
        out_features: int,
        tensor: TensorParallel,
        *,
        bias: bool,
        dtype: torch.dtype,
        product: Product = F.linear,
    ) -> None:
        super().__init__(own_features, out_features, bias=bias, dtype=dtype)
        self.tensor = tensor
        self.product = product

    def forward(self, own_channels: Tensor) -> Tensor:
        hidden = leave(self.product(own_channels, self.weight, None), self.tensor)
        return hidden if self.bias is None else hidden + self.bias


class ProductLinear(nn.Linear):
    """A whole layer whose product another function makes."""

    def __init__(self, in_features: int, out_features: int, product: Product, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype)
        self.product = product

    def forward(self, inputs: Tensor) -> Tensor:
        return self.product(inputs, self.weight, self.bias)


class _ColumnLinear(torch.autograd.Function):
    """Region and product in one, because backward overlaps what crosses the link with products.

        with sequence parallelism      without
        gather own input               gradient of the input
          gradient of the input        sum over the ranks: exchange
        sum over the ranks, own part     gradient of the weight
          gradient of the weight       sum over the ranks: gather

    Keeps the input as it is between the layers, and the parameter itself, whose storage may be freed between forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tensor: TensorParallel) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.tensor = tensor
        input_BSM = gathered_tokens(hidden, tensor.link) if tensor.sequence_parallel else hidden
        return F.linear(input_BSM, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSN: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        link, divides_tokens = ctx.tensor.link, ctx.tensor.sequence_parallel
        grad_XN = grad_BSN.reshape(-1, grad_BSN.shape[-1])
        gathering = link.start_gather(hidden) if divides_tokens and needs_weight else None
        grad_XM = grad_XN @ weight
        input_BSM = hidden if gathering is None else joined(gathering.wait())
        summing = link.start_sum_scattered(grad_XM) if divides_tokens else link.start_summed(grad_XM)
        del grad_XM
        grad_weight = grad_XN.t() @ input_BSM.reshape(-1, input_BSM.shape[-1]) if needs_weight else None
        grad_bias = grad_XN.sum(0) if needs_bias else None
        return summing.wait().view(hidden.shape), grad_weight, grad_bias, None
