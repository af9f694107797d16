"""Divided linear layers, to the bit, beside loops over the ranks in one process; and what they keep for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from harness.recorded_link import RecordedLink
from harness.tensor_ranks import run_tensor_ranks, summed_in_order
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.tensor_parallel.layers import ColumnLinear, RowLinear

pytestmark = pytest.mark.virtual

SAMPLES, LENGTH, WIDTH, INNER = 3, 4, 10, 24
TOKENS = SAMPLES * LENGTH

divisions = pytest.mark.parametrize("ranks", [2, 4])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
biases = pytest.mark.parametrize("bias", [True, False])
token_orders = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all tokens", "own tokens"])


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def between(whole: Tensor, ranks: int, rank: int, sequence_parallel: bool) -> Tensor:
    """The tokens that a rank has between the layers."""
    if not sequence_parallel:
        return whole
    part = TOKENS // ranks
    return whole.view(TOKENS, -1)[rank * part : (rank + 1) * part].view(SAMPLES, LENGTH // ranks, -1)


def trained(layer: nn.Linear, weight: Tensor, bias: Tensor | None, values: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and the gradients of input, weight and, if there is one, bias."""
    layer.weight = nn.Parameter(weight.clone())
    layer.bias = None if bias is None else nn.Parameter(bias.clone())
    leaf = values.clone().requires_grad_()
    output = layer(leaf)
    inputs = [leaf, layer.weight] if bias is None else [leaf, layer.weight, layer.bias]
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


@token_orders
@biases
@dtypes
@divisions
def test_a_column_linear_is_the_products_of_each_ranks_rows_and_a_sum_of_input_gradients(
    ranks: int, dtype: torch.dtype, bias: bool, sequence_parallel: bool
) -> None:
    hidden = drawn(0, SAMPLES, LENGTH, WIDTH, dtype=dtype)
    weights = drawn(1, INNER, WIDTH, dtype=dtype).chunk(ranks)
    biases = drawn(2, INNER, dtype=dtype).chunk(ranks)
    grads = drawn(3, SAMPLES, LENGTH, INNER, dtype=dtype).chunk(ranks, dim=-1)

    def on_rank(link: TensorLink) -> list[Tensor]:
        layer = ColumnLinear(WIDTH, INNER // ranks, TensorParallel(link, sequence_parallel), bias=bias, dtype=dtype)
        own = between(hidden, ranks, link.rank, sequence_parallel)
        return trained(layer, weights[link.rank], biases[link.rank] if bias else None, own, grads[link.rank])

    of_ranks = run_tensor_ranks(ranks, on_rank)
    flat_grads = [grad.reshape(TOKENS, -1) for grad in grads]
    grad_hidden = summed_in_order([grad @ weight for grad, weight in zip(flat_grads, weights, strict=True)])
    for rank, (output, grad_input, grad_weight, *grad_bias) in enumerate(of_ranks):
        assert torch.equal(output, F.linear(hidden, weights[rank], biases[rank] if bias else None))
        assert torch.equal(grad_input, between(grad_hidden.view_as(hidden), ranks, rank, sequence_parallel))
        assert torch.equal(grad_weight, flat_grads[rank].t() @ hidden.view(TOKENS, WIDTH))
        assert all(torch.equal(grad, flat_grads[rank].sum(0)) for grad in grad_bias)


@token_orders
@biases
@dtypes
@divisions
def test_a_row_linear_is_the_sum_of_the_products_of_each_ranks_columns_and_then_the_bias_once(
    ranks: int, dtype: torch.dtype, bias: bool, sequence_parallel: bool
) -> None:
    inner = [part.contiguous() for part in drawn(0, SAMPLES, LENGTH, INNER, dtype=dtype).chunk(ranks, dim=-1)]
    weights = [part.contiguous() for part in drawn(1, WIDTH, INNER, dtype=dtype).chunk(ranks, dim=1)]
    of_all = drawn(2, WIDTH, dtype=dtype)
    grad = drawn(3, SAMPLES, LENGTH, WIDTH, dtype=dtype)

    def on_rank(link: TensorLink) -> list[Tensor]:
        layer = RowLinear(INNER // ranks, WIDTH, TensorParallel(link, sequence_parallel), bias=bias, dtype=dtype)
        own_grad = between(grad, ranks, link.rank, sequence_parallel)
        return trained(layer, weights[link.rank], of_all if bias else None, inner[link.rank], own_grad)

    of_ranks = run_tensor_ranks(ranks, on_rank)
    total = summed_in_order([F.linear(values, weight) for values, weight in zip(inner, weights, strict=True)])
    flat_grad = grad.view(TOKENS, WIDTH)
    for rank, (output, grad_inner, grad_weight, *grad_bias) in enumerate(of_ranks):
        expected = between(total, ranks, rank, sequence_parallel)
        assert torch.equal(output, expected + of_all if bias else expected)
        assert torch.equal(grad_inner.reshape(TOKENS, -1), flat_grad @ weights[rank])
        assert torch.equal(grad_weight, flat_grad.t() @ inner[rank].reshape(TOKENS, -1))
        own_grad = between(grad, ranks, rank, sequence_parallel).reshape(-1, WIDTH)
        assert all(torch.equal(own, own_grad.sum(0)) for own in grad_bias)


@token_orders
def test_a_column_linear_keeps_its_input_as_it_is_between_the_layers_and_the_parameter_itself(sequence_parallel: bool) -> None:
    def on_rank(link: TensorLink) -> None:
        layer = ColumnLinear(WIDTH, INNER, TensorParallel(link, sequence_parallel), bias=True, dtype=torch.float32)
        hidden = between(torch.zeros(SAMPLES, LENGTH, WIDTH), 2, link.rank, sequence_parallel).clone().requires_grad_()
        kept: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(hidden)
        assert [tensor.data_ptr() for tensor in kept] == [hidden.data_ptr(), layer.weight.data_ptr()]
        assert kept[1] is layer.weight

    run_tensor_ranks(2, on_rank)


@token_orders
def test_backward_reads_the_values_that_the_weights_have_then(sequence_parallel: bool) -> None:
    """A weight's storage is freed after forward; other storage is there in backward."""

    def on_rank(link: TensorLink) -> None:
        tensor = TensorParallel(link, sequence_parallel)
        column = ColumnLinear(WIDTH, INNER, tensor, bias=True, dtype=torch.float32)
        row = RowLinear(INNER, WIDTH, tensor, bias=True, dtype=torch.float32)
        hidden = between(drawn(0, SAMPLES, LENGTH, WIDTH, dtype=torch.float32), 2, link.rank, sequence_parallel).clone().requires_grad_()
        parameters = [*column.parameters(), *row.parameters()]
        expected = torch.autograd.grad(row(column(hidden)).square().sum(), [hidden, *parameters])
        loss = row(column(hidden)).square().sum()
        storages = [(parameter, parameter.data, parameter.data.clone()) for parameter in parameters]
        for parameter, values, _ in storages:
            values.untyped_storage().resize_(0)
            parameter.data = torch.full((), float("nan")).expand(values.shape)
        for parameter, values, copy in storages:
            values.untyped_storage().resize_(copy.nbytes)
            parameter.data = values.copy_(copy)
        found = torch.autograd.grad(loss, [hidden, *parameters])
        assert all(map(torch.equal, found, expected))

    run_tensor_ranks(2, on_rank)


class Products(TorchDispatchMode):
    """Calls `record` for each product of matrices."""

    def __init__(self, record: Callable[[str], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self._record("product")
        return func(*args, **(kwargs or {}))


@token_orders
def test_in_backward_of_a_column_linear_a_product_runs_while_the_link_works(sequence_parallel: bool) -> None:
    def on_rank(link: TensorLink) -> list[str]:
        events: list[str] = []
        recorded = cast(TensorLink, RecordedLink(link, lambda operation: events.append(operation[0])))
        layer = ColumnLinear(WIDTH, INNER, TensorParallel(recorded, sequence_parallel), bias=True, dtype=torch.float32)
        hidden = between(torch.zeros(SAMPLES, LENGTH, WIDTH), 2, link.rank, sequence_parallel).clone().requires_grad_()
        output = layer(hidden).sum()
        events.clear()
        with Products(events.append):
            output.backward()
        return events

    overlapping_sum = ["product", "wait"]
    expected = {
        False: ["product", "start_summed", *overlapping_sum],
        True: ["start_gather", "product", "wait", "start_sum_scattered", *overlapping_sum],
    }
    assert run_tensor_ranks(2, on_rank) == [expected[sequence_parallel]] * 2
