from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.training.step import gather_numbers, microbatch_loss


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


def test_a_micro_batch_in_which_no_token_counts_has_loss_and_gradient_0() -> None:
    model = TokensAsLosses()
    loss = microbatch_loss(model, batch_with_mask([[0.0] * 3] * 2), torch.device("cpu"))
    loss.backward()
    assert loss.item() == 0.0 and model.factor.grad is not None and model.factor.grad.item() == 0.0


def test_scalars_of_all_ranks_come_in_one_message_as_numbers_of_fp64() -> None:
    messages: list[Tensor] = []

    def gather_world(row: Tensor) -> Tensor:
        messages.append(row)
        return torch.stack([row, row + 1, row + 2, row + 3]).view(2, 2, -1)

    engine: Any = SimpleNamespace(device=torch.device("cpu"), gather_world=gather_world)
    gathered = gather_numbers([torch.tensor(0.1, dtype=torch.float64), 4], engine)
    assert gathered.tolist() == [[[0.1, 4.0], [1.1, 5.0]], [[2.1, 6.0], [3.1, 7.0]]]
    assert len(messages) == 1 and messages[0].dtype is torch.float64
