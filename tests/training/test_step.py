from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp.data.loader import MicroBatch, TokenPart
from megatron_zpp.training.step import microbatch_loss, on_device, row_of


class TokensAsLosses(nn.Module):
    """A model whose loss at a token is the token's id times its one parameter; remembers what else it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.seen: dict[str, object] = {}

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor, **others: object) -> Tensor:
        self.seen = others
        return tokens_BS.float() * self.factor


def batch_with_mask(mask: list[list[float]]) -> MicroBatch:
    tokens = torch.arange(1, 7).view(2, 3)
    return MicroBatch(tokens, tokens, torch.tensor(mask), 4, position_ids=tokens - 1, document_lengths=torch.tensor([2, 1, 3]))


def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    model = TokensAsLosses()
    batch = batch_with_mask([[1, 0, 1], [0, 0, 1]])
    assert microbatch_loss(model, batch, torch.device("cpu")).item() == pytest.approx((1 + 3 + 6) / 3)
    assert model.seen["first_sample"] == 4 and model.seen["document_lengths_R"] is batch.document_lengths
    assert torch.equal(model.seen["position_ids_BS"], batch.tokens - 1)  # type: ignore[arg-type]


def test_ranks_that_divide_samples_return_losses_whose_mean_is_that_over_all_tokens_that_count() -> None:
    model, whole = TokensAsLosses(), batch_with_mask([[1, 0, 1], [0, 0, 1]])
    losses = [microbatch_loss(model, whole.keeping(TokenPart(rank, 3)), torch.device("cpu")).item() for rank in range(3)]
    assert sum(losses) / 3 == pytest.approx((1 + 3 + 6) / 3)


def test_a_micro_batch_in_which_no_token_counts_has_loss_and_gradient_0() -> None:
    model = TokensAsLosses()
    loss = microbatch_loss(model, batch_with_mask([[0.0] * 3] * 2), torch.device("cpu"))
    loss.backward()
    assert loss.item() == 0.0 and model.factor.grad is not None and model.factor.grad.item() == 0.0


def test_on_a_cpu_the_tensors_of_a_micro_batch_are_those_of_the_batch() -> None:
    batch = batch_with_mask([[1.0] * 3] * 2)
    moved = on_device(batch, torch.device("cpu"))
    assert all(getattr(moved, field.name) is getattr(batch, field.name) for field in dataclasses.fields(batch))


def test_a_gpu_copies_every_tensor_from_pinned_memory_before_the_model_is_called_and_the_host_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in for pinned memory and for the copy to the device."""
    events: list[str] = []
    pinned: set[int] = set()

    def pin_memory(values: Tensor) -> Tensor:
        copy = values.clone()
        pinned.add(copy.data_ptr())
        return copy

    def to(values: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        assert values.data_ptr() in pinned and non_blocking and device.type == "cuda"
        events.append("copy")
        return values

    class Listening(TokensAsLosses):
        def forward(self, tokens_BS: Tensor, labels_BS: Tensor, **others: object) -> Tensor:
            events.append("forward")
            return super().forward(tokens_BS, labels_BS, **others)

    batch = batch_with_mask([[1, 0, 1], [0, 0, 1]])
    expected = microbatch_loss(TokensAsLosses(), batch, torch.device("cpu"))
    model = Listening()
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", pin_memory)
        patch.setattr(Tensor, "to", to)
        loss = microbatch_loss(model, batch, torch.device("cuda"))
    assert events == ["copy"] * 4 + ["forward"]
    assert torch.equal(loss, expected)
    assert model.seen["document_lengths_R"] is batch.document_lengths  # the host reads them


def test_scalars_become_a_row_of_fp64() -> None:
    row = row_of([torch.tensor(0.1, dtype=torch.float64), 4], torch.device("cpu"))
    assert row.tolist() == [0.1, 4.0] and row.dtype is torch.float64
