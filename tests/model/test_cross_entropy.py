from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.model.loss import token_loss
from megatron_zpp.ops import softmax_reference


def logits_and_labels(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 10 * torch.randn(3, 7, 50, generator=generator)
    return logits.to(dtype).requires_grad_(), torch.randint(50, (3, 7), generator=generator)


def weighted_gradient(loss: Tensor, logits: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad((loss * torch.linspace(-1, 1, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum(), logits)
    return gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_numel", [1, 200, 1 << 24])
def test_loss_and_gradient_equal_the_fp64_ones_of_the_same_logits(
    dtype: torch.dtype, chunk_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_reference, "CHUNK_NUMEL", chunk_numel)
    logits, labels = logits_and_labels(dtype)
    loss = token_loss(logits, labels)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    torch.testing.assert_close(
        loss, expected.float(), rtol=1e-6, atol=1e-6
    )  # a few fp32 roundings: the logits themselves are exact in fp64

    gradient = weighted_gradient(loss, logits)
    assert gradient.dtype == dtype
    rounding = torch.finfo(dtype).eps  # one rounding to the dtype of the logits; fp16 also has its smallest subnormal
    torch.testing.assert_close(gradient.double(), weighted_gradient(expected, exact), rtol=2 * rounding, atol=1e-6)


def test_backward_keeps_nothing_but_logits_and_labels() -> None:
    logits, labels = logits_and_labels(torch.bfloat16)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_loss(logits, labels)
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} == {
        logits.untyped_storage().data_ptr(),
        labels.untyped_storage().data_ptr(),
    }


def test_large_logits_stay_finite_and_a_nan_stays_with_its_token() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [float("nan"), 0.0, 0.0], [0.0, 0.0, 0.0]])
    loss = token_loss(logits, torch.tensor([0, 1, 2]))
    assert loss[0] == 0
    assert loss[1].isnan()
    assert loss[2].item() == pytest.approx(1.0986123)


def test_a_label_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        token_loss(torch.zeros(2, 5), torch.tensor([0, 5]))
