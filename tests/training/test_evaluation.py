"""The loss on held-out data, over every sample exactly once where that is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_step import TokensAsLosses
from torch import Tensor

from megatron_zpp.config.schema import TrainingConfig
from megatron_zpp.data.documents import DocumentRules
from megatron_zpp.data.gpt_dataset import Sample
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.sampler import WholePassSampler
from megatron_zpp.training.evaluation import HeldOutSet, evaluate, evaluations_before, is_followed_by_validation

SEQ_LENGTH = 3
RULES = DocumentRules(99, False, False, False)


class Squares:
    """Sample i holds the token i squared, and its last token counts in every other sample only."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        tokens = np.full(SEQ_LENGTH, index * index, dtype=np.int64)
        mask = np.ones(SEQ_LENGTH, dtype=np.float32)
        mask[-1] = index % 2
        return {"tokens": tokens, "labels": tokens, "loss_mask": mask}


def rows_of(rank: int, ranks: int, micro_batch_size: int, samples: int, passes: int) -> list[Tensor]:
    """What this rank puts into the gather of each of several evaluations over the whole set."""
    gathered: list[Tensor] = []

    def gather_world(row: Tensor) -> Tensor:
        gathered.append(row)
        return row.view(1, 1, -1)

    engine: Any = SimpleNamespace(device=torch.device("cpu"), gather_world=gather_world)
    sampler = WholePassSampler(samples, micro_batch_size, rank, ranks)
    held_out = HeldOutSet("", MicroBatches(Squares(samples), sampler, 0, RULES), sampler.microbatches)
    for _ in range(passes):
        evaluate(TokensAsLosses(), engine, held_out)
    return gathered


@given(samples=st.integers(1, 40), micro_batch_size=st.integers(1, 5), ranks=st.integers(1, 6))
def test_every_sample_weighs_the_same_in_every_pass_however_uneven_the_last_batch_is(
    samples: int, micro_batch_size: int, ranks: int
) -> None:
    by_rank = [rows_of(rank, ranks, micro_batch_size, samples, passes=2) for rank in range(ranks)]
    tokens = sum(2 + index % 2 for index in range(samples))
    losses = sum((2 + index % 2) * index * index for index in range(samples))
    for one_pass in zip(*by_rank, strict=True):
        assert torch.stack(one_pass).sum(dim=0).tolist() == [losses, tokens]


def test_the_loss_is_the_mean_over_tokens_and_not_over_micro_batches() -> None:
    engine: Any = SimpleNamespace(device=torch.device("cpu"), gather_world=lambda row: row.view(1, 1, -1))
    sampler = WholePassSampler(3, 2, 0, 1)
    held_out = HeldOutSet("", MicroBatches(Squares(3), sampler, 0, RULES), sampler.microbatches)
    assert evaluate(TokensAsLosses(), engine, held_out) == pytest.approx((2 * 0 + 3 * 1 + 2 * 4) / 7)


def test_ladders_that_evaluate_the_same_samples_count_them_once() -> None:
    rows = iter([torch.tensor([[[6.0, 2.0], [600.0, 200.0]], [[8.0, 5.0], [800.0, 500.0]]], dtype=torch.float64)])
    engine: Any = SimpleNamespace(device=torch.device("cpu"), gather_world=lambda row: next(rows))
    held_out = HeldOutSet("", MicroBatches(Squares(3), WholePassSampler(3, 2, 0, 1), 0, RULES), 2)
    assert evaluate(TokensAsLosses(), engine, held_out) == (6 + 8) / (2 + 5)


@given(interval=st.integers(1, 20), start=st.integers(0, 50), iteration=st.integers(0, 100))
def test_validations_that_have_been_are_counted(interval: int, start: int, iteration: int) -> None:
    training = TrainingConfig(eval_interval=interval, start_eval_at_iter=start)
    before = sum(is_followed_by_validation(earlier, training) for earlier in range(1, iteration + 1))
    assert evaluations_before(iteration, training) == before
