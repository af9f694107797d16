"""Head and loss in chunks, beside the same from whole logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.small_gpt import VOCAB, loss_and_gradients, sample_batch, small_config, small_gpt
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.model.loss import head_loss, token_loss
from megatron_zpp.model.loss_chunks import chunk_columns, has_chunks, ranges
from megatron_zpp.ops import softmax_reference

SAMPLES, LENGTH, HIDDEN = 3, 7, 16
TOKENS = SAMPLES * LENGTH
CHUNKS = [1, 4, 7, 20]


def head_inputs(dtype: torch.dtype, vocabulary: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden_BSH, weight_VH, labels_BS); logits have a standard deviation of 4."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SAMPLES, LENGTH, HIDDEN, generator=generator)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator)
    labels = torch.randint(vocabulary, (SAMPLES, LENGTH), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def results(loss_of: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and the gradients of hidden states and weight, if every token's loss has another gradient, one of them 0."""
    loss = loss_of(hidden, weight, labels)
    upstream = torch.linspace(-1, 1, labels.numel()).view(labels.shape)
    grad_hidden, grad_weight = torch.autograd.grad((loss * upstream).sum(), (hidden, weight))
    return loss.detach(), grad_hidden, grad_weight


def exact_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def exact_results(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return results(exact_loss, hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), labels)


@pytest.mark.parametrize("wide_numel", [1, 130, 1 << 24])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_in_fp32_loss_and_gradients_are_the_fp64_ones_for_every_gradient_of_the_tokens_losses(
    chunk_tokens: int, wide_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_reference, "CHUNK_NUMEL", wide_numel)
    inputs = head_inputs(torch.float32)
    chunked = results(lambda *args: head_loss(*args, chunk_tokens), *inputs)
    # Logits up to 16 have an error of a few ulps of 2^-20; so have the exponents, and softmax relative to itself.
    for own, exact in zip(chunked, exact_results(*inputs), strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_in_16_bits_loss_and_gradients_differ_from_the_fp64_ones_by_their_roundings(dtype: torch.dtype, chunk_tokens: int) -> None:
    """u: half an ulp relative to the value. z: the largest logit, sum |hidden| |weight| at most.

    A logit is rounded once: its error is e = u z, so the loss moves by 2 e at most. The gradient of a logit is p - y times the upstream
    gradient g; p moves by a factor exp(2 e), and the result is rounded: |g| (expm1(2 e) p + u (p + y)) < |g| (expm1(2 e) + u) (p + y).
    The head's gradient sums these errors times |hidden|, and is rounded once. The hidden states' gradient sums them times |weight|; the
    product of every chunk is rounded, by less than u sum |g| (p + y) |weight| in all, and so is the sum.
    """
    hidden, weight, labels = head_inputs(dtype)
    loss, grad_hidden, grad_weight = results(lambda *args: head_loss(*args, chunk_tokens), hidden, weight, labels)
    wide_hidden, wide_weight = hidden.detach().double().flatten(0, 1), weight.detach().double()
    exact, exact_hidden, exact_weight = exact_results(hidden, weight, labels)
    u = torch.finfo(dtype).eps / 2
    error = u * float((wide_hidden.abs() @ wide_weight.abs().T).max())
    assert float((loss.double() - exact).abs().max()) <= 2 * error + 1e-5
    upstream = torch.linspace(-1, 1, TOKENS).double().abs()
    sizes = (wide_hidden @ wide_weight.T).softmax(-1) + F.one_hot(labels.flatten(), weight.shape[0])
    bound = upstream[:, None] * sizes * (math.expm1(2 * error) + u)
    tiny = torch.finfo(dtype).smallest_normal  # of fp16, below which roundings are not relative
    rounded = u * (upstream[:, None] * sizes)
    hidden_bound = (bound + 2 * rounded) @ wide_weight.abs() + weight.shape[0] * tiny
    weight_bound = (bound + rounded).T @ wide_hidden.abs() + TOKENS * tiny
    assert bool(((grad_hidden.double() - exact_hidden).flatten(0, 1).abs() <= 1.01 * hidden_bound).all())
    assert bool(((grad_weight.double() - exact_weight).abs() <= 1.01 * weight_bound).all())
    assert grad_hidden.dtype == grad_weight.dtype == dtype and loss.dtype == torch.float32


def test_the_gradient_of_hidden_states_is_added_up_in_fp32_over_the_chunks() -> None:
    """512 chunks add 2^-9 each; bf16 would stop at one half, where this is half of an ulp and is rounded away."""
    tokens, vocabulary = 512, 1024
    hidden, weight = torch.zeros(tokens, 1).bfloat16().requires_grad_(), torch.ones(vocabulary, 1).bfloat16()
    weight[0] = 0  # the row of all labels
    head_loss(hidden, weight.requires_grad_(), torch.zeros(tokens, dtype=torch.int64), 1).sum().backward()
    assert hidden.grad is not None and hidden.grad.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [0, TOKENS, 1000])
def test_without_chunks_and_in_one_chunk_bits_are_those_of_whole_logits(dtype: torch.dtype, chunk_tokens: int) -> None:
    inputs = head_inputs(dtype)
    whole = results(lambda hidden, weight, labels: token_loss(F.linear(hidden, weight), labels), *inputs)
    assert all(map(torch.equal, results(lambda *args: head_loss(*args, chunk_tokens), *inputs), whole))


class LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.numel = max(self.numel, output.numel())
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_no_tensor_is_larger_than_the_logits_of_a_chunk_or_the_head_in_forward_and_backward(dtype: torch.dtype, chunk_tokens: int) -> None:
    hidden, weight, labels = head_inputs(dtype, vocabulary=200)
    with LargestTensor() as whole:
        head_loss(hidden, weight, labels, 0).sum().backward()
    with LargestTensor() as chunked:
        head_loss(hidden, weight, labels, chunk_tokens).sum().backward()
    assert whole.numel == TOKENS * 200
    assert chunked.numel == max(chunk_tokens * 200, weight.numel())


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_an_evaluation_computes_the_same_bits_in_chunks_and_keeps_nothing(chunk_tokens: int) -> None:
    hidden, weight, labels = head_inputs(torch.float32, vocabulary=200)
    trained = head_loss(hidden, weight, labels, chunk_tokens)
    with torch.no_grad(), LargestTensor() as largest:
        evaluated = head_loss(hidden, weight, labels, chunk_tokens)
    assert torch.equal(evaluated, trained) and not evaluated.requires_grad
    assert largest.numel == max(chunk_tokens * 200, weight.numel())


def test_backward_keeps_the_head_itself_and_two_numbers_per_token_but_no_logits() -> None:
    hidden, weight, labels = head_inputs(torch.bfloat16)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        head_loss(hidden, weight, labels, 4)
    assert any(tensor is weight for tensor in kept)
    own = [tensor for tensor in kept if tensor.data_ptr() not in (hidden.data_ptr(), weight.data_ptr(), labels.data_ptr())]
    assert [(tensor.numel(), tensor.dtype) for tensor in own] == [(TOKENS, torch.float32)] * 2


def test_backward_reads_the_values_that_the_weight_has_then() -> None:
    """A weight's storage is freed after forward; other storage is there in backward."""
    hidden, weight, labels = head_inputs(torch.float32)
    expected = results(lambda *args: head_loss(*args, 4), hidden, weight, labels)
    values = weight.detach().clone()
    loss = head_loss(hidden, weight, labels, 4)
    weight.data = torch.full((), float("nan")).expand(weight.shape)
    weight.data = values
    (loss * torch.linspace(-1, 1, TOKENS).view(labels.shape)).sum().backward()
    assert torch.equal(hidden.grad, expected[1]) and torch.equal(weight.grad, expected[2])  # type: ignore[arg-type]


def test_large_logits_stay_finite_and_a_nan_stays_with_its_token() -> None:
    hidden = torch.tensor([[1e30, -1e30, 0.0], [float("nan"), 0.0, 0.0], [0.0, 0.0, 0.0]]).requires_grad_()
    loss = head_loss(hidden, torch.eye(3), torch.tensor([0, 1, 2]), 1)
    assert loss[0] == 0 and loss[1].isnan() and loss[2].item() == pytest.approx(math.log(3))
    loss.sum().backward()
    assert hidden.grad is not None and hidden.grad[0].tolist() == [0.0, 0.0, 0.0]
    assert hidden.grad[1].isnan().all() and hidden.grad[2].isfinite().all()


def test_a_label_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        head_loss(torch.zeros(2, 5), torch.zeros(5, 5), torch.tensor([0, 5]), 1)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 4000))
def test_chunks_of_backward_cover_the_vocabulary_and_have_no_more_logits_than_those_of_forward(
    tokens: int, vocabulary: int, chunk_tokens: int
) -> None:
    limit = min(chunk_tokens or tokens, tokens) * vocabulary
    if not has_chunks(tokens, chunk_tokens):
        return
    parts = list(ranges(vocabulary, chunk_columns(tokens, vocabulary, chunk_tokens)))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == vocabulary
    assert all(tokens * (part.stop - part.start) <= max(limit, tokens) for part in parts)


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_model_in_chunks_has_the_loss_and_the_gradients_of_the_model_with_whole_logits(untied: bool, recompute: str | None) -> None:
    changes: dict[str, Any] = {"untie_embeddings_and_output_weights": untied, "recompute_granularity": recompute}
    whole_loss, whole = loss_and_gradients(small_gpt(loss_chunk_tokens=0, **changes))
    loss, gradients = loss_and_gradients(small_gpt(loss_chunk_tokens=5, **changes))
    torch.testing.assert_close(loss, whole_loss, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == whole.keys()
    for name, gradient in gradients.items():
        # Sums of fp32 products in another order; a large sum of one parameter says how large the summands of its small ones are.
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=2e-6 * float(whole[name].abs().max()))


def test_a_model_that_evaluates_has_no_tensor_as_large_as_all_logits() -> None:
    tokens_BS, labels_BS = sample_batch()
    vocabulary = 1000
    model = materialize(GPT(small_config(loss_chunk_tokens=1), vocabulary, 7, torch.float32)).eval()
    with torch.no_grad(), LargestTensor() as largest:
        model(tokens_BS, labels_BS, first_sample=0)
    assert largest.numel < tokens_BS.numel() * vocabulary


def test_logits_are_whole_where_there_are_no_labels() -> None:
    tokens_BS, _ = sample_batch()
    assert small_gpt(loss_chunk_tokens=1)(tokens_BS, None, first_sample=0).shape == (*tokens_BS.shape, VOCAB)
