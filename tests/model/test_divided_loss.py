"""The loss of logits whose vocabulary tensor ranks share."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness.tensor_ranks import run_tensor_ranks
from torch import Tensor

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.model.loss import head_loss, softmax_loss
from megatron_zpp.ops import softmax_reference
from megatron_zpp.tensor_parallel.vocabulary import DividedRows

pytestmark = pytest.mark.virtual

VOCAB, HIDDEN, TOKENS = 48, 16, 21
UPSTREAM = torch.linspace(-1, 1, TOKENS)  # one token's is 0


def logits_and_labels(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (10 * torch.randn(TOKENS, VOCAB, generator=generator)).to(dtype), torch.randint(VOCAB, (TOKENS,), generator=generator)


def divided(link: TensorLink) -> DividedRows:
    return DividedRows(VOCAB // link.ranks, link)


def looped(logits: Tensor, labels: Tensor, ranks: int) -> tuple[Tensor, list[Tensor]]:
    """Loss, and gradient of each rank's logits, with the arithmetic that ranks have."""
    own = [part.float() for part in logits.chunk(ranks, dim=1)]
    largest = torch.stack([part.amax(1) for part in own]).amax(0)
    total, label_logit = torch.zeros_like(largest), logits.float().gather(1, labels[:, None]).squeeze(1)
    for part in own:
        own_largest = part.amax(1)
        total = total + (part - own_largest[:, None]).exp().sum(1) * (own_largest - largest).exp()
    loss = total.log() - (label_logit - largest)
    grads = torch.cat([(part - largest[:, None]).exp() * (UPSTREAM / total)[:, None] for part in own], dim=1)
    grads[torch.arange(TOKENS), labels] -= UPSTREAM
    return loss, list(grads.to(logits.dtype).chunk(ranks, dim=1))


def on_ranks(ranks: int, logits: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    def on_rank(link: TensorLink) -> tuple[Tensor, Tensor]:
        own = logits.chunk(ranks, dim=1)[link.rank].clone().requires_grad_()
        loss = softmax_loss(own, labels, divided(link))
        (grad,) = torch.autograd.grad((loss * UPSTREAM).sum(), own)
        return loss.detach(), grad

    return run_tensor_ranks(ranks, on_rank)


@pytest.mark.parametrize("chunk_numel", [30, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradients_are_those_of_a_loop_over_the_ranks_to_the_bit(
    ranks: int, dtype: torch.dtype, chunk_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_reference, "CHUNK_NUMEL", chunk_numel)
    logits, labels = logits_and_labels(dtype)
    expected_loss, expected = looped(logits, labels, ranks)
    for (loss, grad), expected_grad in zip(on_ranks(ranks, logits, labels), expected, strict=True):
        assert torch.equal(loss, expected_loss)
        assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradients_are_the_fp64_ones_of_all_logits(ranks: int) -> None:
    logits, labels = logits_and_labels(torch.float32)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (expected_grad,) = torch.autograd.grad((expected * UPSTREAM.double()).sum(), exact)
    of_ranks = on_ranks(ranks, logits, labels)
    for loss, _ in of_ranks:
        # Exponents up to 60 have an error of half an ulp, 2^-19.
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(torch.cat([grad for _, grad in of_ranks], dim=1).double(), expected_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 20])
@pytest.mark.parametrize("ranks", [2, 4])
def test_in_chunks_the_loss_has_the_same_bits_and_gradients_are_those_of_whole_logits_within_rounding(
    ranks: int, chunk_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)

    def on_rank(link: TensorLink) -> list[list[Tensor]]:
        results = []
        for chunk in (0, chunk_tokens):
            leaf, own = hidden.clone().requires_grad_(), weight.chunk(ranks)[link.rank].clone().requires_grad_()
            loss = head_loss(leaf, own, labels, chunk, divided(link))
            results.append([loss.detach(), *torch.autograd.grad((loss * UPSTREAM).sum(), (leaf, own))])
        return results

    for whole, chunked in run_tensor_ranks(ranks, on_rank):
        for values, expected in zip(chunked, whole, strict=True):
            torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)  # products of other shapes


def test_large_logits_stay_finite_and_a_nan_of_one_rank_is_the_tokens_loss_on_every_rank() -> None:
    logits = torch.zeros(TOKENS, VOCAB)
    logits[0, 0], logits[0, -1], logits[1, -1] = 1e30, -1e30, float("nan")
    for loss, grad in on_ranks(2, logits, torch.zeros(TOKENS, dtype=torch.int64)):
        assert loss[0] == 0 and loss[1].isnan() and loss[2].item() == pytest.approx(math.log(VOCAB))
        assert grad[1].isnan().all() and grad[torch.arange(TOKENS) != 1].isfinite().all()


@pytest.mark.parametrize("chunk_tokens", [0, 1])
def test_a_label_beyond_the_vocabulary_is_an_error(chunk_tokens: int) -> None:
    def on_rank(link: TensorLink) -> None:
        with pytest.raises((IndexError, RuntimeError)):
            head_loss(torch.zeros(2, HIDDEN), torch.zeros(VOCAB // 2, HIDDEN), torch.tensor([0, VOCAB]), chunk_tokens, divided(link))

    run_tensor_ranks(2, on_rank)
