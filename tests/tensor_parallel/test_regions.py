"""What crosses the tensor link at the borders of divided layers, to the bit, beside loops over the ranks in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness.tensor_ranks import run_tensor_ranks, summed_in_order
from torch import Tensor

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.tensor_parallel.regions import enter, gathered_channels, leave, region

pytestmark = pytest.mark.virtual

SAMPLES, LENGTH, WIDTH = 3, 4, 5  # parts of 3 tokens on 4 ranks: of one sample and of two
TOKENS = SAMPLES * LENGTH
Results = list[tuple[Tensor, Tensor]]

divisions = pytest.mark.parametrize("ranks", [2, 4])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def drawn(rank: int, *shape: int, dtype: torch.dtype, site: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * rank + site)).to(dtype)


def results(ranks: int, region: Callable[[Tensor, TensorLink], Tensor], values: list[Tensor], grads: list[Tensor]) -> Results:
    """Output and gradient of the input on each rank."""

    def on_rank(link: TensorLink) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        leaf = values[link.rank].clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
            output = region(leaf, link)
        assert not kept
        (grad,) = torch.autograd.grad(output, leaf, grads[link.rank])
        return output.detach(), grad

    return run_tensor_ranks(ranks, on_rank)


def all_values(ranks: int, length: int, dtype: torch.dtype, site: int) -> list[Tensor]:
    return [drawn(rank, SAMPLES, length, WIDTH, dtype=dtype, site=site) for rank in range(ranks)]


def whole_tokens(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.view(-1, WIDTH) for part in parts]).view(SAMPLES, LENGTH, WIDTH)


def own_tokens(whole: Tensor, ranks: int, rank: int) -> Tensor:
    part = TOKENS // ranks
    return whole.view(TOKENS, WIDTH)[rank * part : (rank + 1) * part].view(SAMPLES, LENGTH // ranks, WIDTH)


@dtypes
@divisions
def test_a_layer_is_entered_with_the_same_tokens_and_sends_back_the_sum_of_the_gradients(ranks: int, dtype: torch.dtype) -> None:
    values, grads = (all_values(ranks, LENGTH, dtype, site) for site in (0, 1))
    for rank, (output, grad) in enumerate(results(ranks, lambda own, link: enter(own, TensorParallel(link)), values, grads)):
        assert torch.equal(output, values[rank])
        assert torch.equal(grad, summed_in_order(grads))


@dtypes
@divisions
def test_a_layer_is_entered_with_the_tokens_of_all_ranks_and_sends_back_its_tokens_of_the_sum(ranks: int, dtype: torch.dtype) -> None:
    values, grads = all_values(ranks, LENGTH // ranks, dtype, 0), all_values(ranks, LENGTH, dtype, 1)
    for rank, (output, grad) in enumerate(results(ranks, lambda own, link: enter(own, TensorParallel(link, True)), values, grads)):
        assert torch.equal(output, whole_tokens(values))
        assert torch.equal(grad, own_tokens(summed_in_order(grads), ranks, rank))


@dtypes
@divisions
def test_a_layer_is_left_with_the_sum_and_gets_back_the_gradient_of_the_rank(ranks: int, dtype: torch.dtype) -> None:
    values, grads = (all_values(ranks, LENGTH, dtype, site) for site in (0, 1))
    for rank, (output, grad) in enumerate(results(ranks, lambda own, link: leave(own, TensorParallel(link)), values, grads)):
        assert torch.equal(output, summed_in_order(values))
        assert torch.equal(grad, grads[rank])


@dtypes
@divisions
def test_a_layer_is_left_with_the_own_tokens_of_the_sum_and_gets_back_the_gradients_of_all_tokens(ranks: int, dtype: torch.dtype) -> None:
    values, grads = all_values(ranks, LENGTH, dtype, 0), all_values(ranks, LENGTH // ranks, dtype, 1)
    for rank, (output, grad) in enumerate(results(ranks, lambda own, link: leave(own, TensorParallel(link, True)), values, grads)):
        assert torch.equal(output, own_tokens(summed_in_order(values), ranks, rank))
        assert torch.equal(grad, whole_tokens(grads))


@divisions
def test_channels_are_gathered_in_the_order_of_the_ranks_and_each_rank_gets_its_channels_gradient(ranks: int) -> None:
    values = all_values(ranks, LENGTH, torch.float32, 0)
    grad_of_all = drawn(9, SAMPLES, LENGTH, ranks * WIDTH, dtype=torch.float32)
    for rank, (output, grad) in enumerate(results(ranks, gathered_channels, values, [grad_of_all] * ranks)):
        assert torch.equal(output, torch.cat(values, dim=-1))
        assert torch.equal(grad, grad_of_all[..., rank * WIDTH : (rank + 1) * WIDTH])


def test_samples_whose_tokens_the_ranks_cannot_share_are_refused() -> None:
    def on_rank(link: TensorLink) -> None:
        with pytest.raises(RuntimeError, match="2 tensor ranks cannot divide samples of 5 tokens"):
            leave(torch.zeros(2, 5, 3), TensorParallel(link, True))

    run_tensor_ranks(2, on_rank)


def test_a_second_derivative_is_an_error_because_what_crosses_a_link_has_none() -> None:
    leaf = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad(region(leaf, torch.clone, torch.clone).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
