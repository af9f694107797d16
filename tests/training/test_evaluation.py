"""The loss on held-out data, over every sample exactly once where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
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
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.evaluation import HeldOutSet, evaluate, evaluations_before, is_followed_by_validation
from megatron_zpp.training.same_samples import SameSamples

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

    engine = engine_with(gather_world, Grid(ranks, ranks, ranks, 1))
    sampler = WholePassSampler(samples, micro_batch_size, rank, ranks)
    held_out = held_out_set(engine, Squares(samples), sampler, sampler.microbatches)
    for _ in range(passes):
        evaluate(TokensAsLosses(), engine, held_out)
    return gathered


def engine_with(gather_world: Callable[[Tensor], Tensor], grid: Grid) -> Any:
    links = SimpleNamespace(grid=grid, ranks=range(grid.world_size))
    return SimpleNamespace(device=torch.device("cpu"), gather_world=gather_world, links=links)


def held_out_set(engine: Any, samples: Squares, sampler: WholePassSampler, microbatches: int) -> HeldOutSet:
    check = SameSamples(engine)
    return HeldOutSet("", MicroBatches(samples, sampler, 0, RULES, check.read), microbatches, check)


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
    engine = engine_with(lambda row: row.view(1, 1, -1), Grid(1, 1, 1, 1))
    sampler = WholePassSampler(3, 2, 0, 1)
    held_out = held_out_set(engine, Squares(3), sampler, sampler.microbatches)
    assert evaluate(TokensAsLosses(), engine, held_out) == pytest.approx((2 * 0 + 3 * 1 + 2 * 4) / 7)


def test_ladders_that_evaluate_the_same_samples_count_them_once() -> None:
    sums = torch.tensor([[[6.0, 2.0], [600.0, 200.0]], [[8.0, 5.0], [800.0, 500.0]]], dtype=torch.float64)

    def gather_world(own: Tensor) -> Tensor:
        """`sums` with the checksum of this rank. The first micro-batch has a message of its own, of two numbers."""
        alike = own.expand(2, 2, -1)
        return alike if own.numel() == 2 else torch.cat((sums, alike[..., 2:]), dim=2)

    engine = engine_with(gather_world, Grid(4, 4, 2, 2))
    held_out = held_out_set(engine, Squares(3), WholePassSampler(3, 2, 0, 1), 2)
    assert evaluate(TokensAsLosses(), engine, held_out) == (6 + 8) / (2 + 5)


@pytest.mark.parametrize("evaluations", [1, 2])
def test_a_later_micro_batch_that_differs_ends_the_evaluation_that_has_read_it(evaluations: int) -> None:
    """Ranks that divide samples: the last evaluation of the second one has read another micro-batch than that of the first."""

    def gather_world(own: Tensor) -> Tensor:
        sizes.append(own.numel())
        rows = own.repeat(2, 1, 1)
        rows[1, 0, 2:] += sizes.count(3) == evaluations
        return rows

    sizes: list[int] = []
    engine = engine_with(gather_world, Grid(2, 2, 2, 1, 2))
    held_out = held_out_set(engine, Squares(8), WholePassSampler(8, 2, 0, 1), 2)
    for _ in range(evaluations - 1):
        evaluate(TokensAsLosses(), engine, held_out)
    with pytest.raises(RuntimeError, match="ranks 0 and 1 divide samples .--context-parallel-size 2., but .* of all so far on rank 0"):
        evaluate(TokensAsLosses(), engine, held_out)
    assert sizes == [2, *[3] * evaluations]  # only the first micro-batch of a set takes a message of its own


@given(interval=st.integers(1, 20), start=st.integers(0, 50), iteration=st.integers(0, 100))
def test_validations_that_have_been_are_counted(interval: int, start: int, iteration: int) -> None:
    training = TrainingConfig(eval_interval=interval, start_eval_at_iter=start)
    before = sum(is_followed_by_validation(earlier, training) for earlier in range(1, iteration + 1))
    assert evaluations_before(iteration, training) == before
