"""Ranks that share layers read the same samples, or the run ends and names two of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.data.documents import DocumentRules
from megatron_zpp.data.loader import MicroBatch, MicroBatches
from megatron_zpp.data.sampler import MicroBatchSampler
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.same_samples import checksum, same_samples_check

GRID = Grid(8, 4, 2, 2)
TOKENS = torch.arange(12).view(2, 6)


def batch(first_sample: int = 4, shift: int = 0) -> MicroBatch:
    return MicroBatch(TOKENS + shift, TOKENS + shift + 1, torch.ones(2, 6), first_sample)


def engine_of(other: MicroBatch, at: int, calls: list[Tensor], grid: Grid = GRID) -> Any:
    """An engine in whose world every rank has the caller's micro-batch, but rank `at` has `other`."""

    def gather_world(own: Tensor) -> Tensor:
        calls.append(own)
        rows = own.expand(grid.world_size, -1).clone()
        rows[at] = torch.tensor([checksum(other), other.first_sample], dtype=own.dtype)
        return rows.view(grid.data_ranks, grid.tensor_ranks, -1)

    return SimpleNamespace(device=torch.device("cpu"), gather_world=gather_world, ladder=SimpleNamespace(grid=grid))


@pytest.mark.parametrize(
    ("other", "at", "words"),
    [
        (batch(shift=1), 5, "ranks 4 and 5 share layers .--tensor-model-parallel-size 2., but their micro-batches differ: from sample 4"),
        (batch(first_sample=6), 2, "ranks 2 and 3 share layers.*from sample 6 on with checksum .* on rank 2, from sample 4 on"),
    ],
)
def test_a_rank_with_other_tokens_or_samples_ends_the_run_and_both_ranks_are_named(other: MicroBatch, at: int, words: str) -> None:
    check = same_samples_check(engine_of(other, at, []))
    assert check is not None
    with pytest.raises(RuntimeError, match=words):
        check(batch())


@pytest.mark.parametrize(
    ("grid", "at", "words"),
    [
        (Grid(8, 4, 4, 1, 4), 6, "ranks 4 and 6 share samples .--context-parallel-size 4., but their micro-batches differ"),
        (
            Grid(8, 8, 2, 2, 2),
            7,
            "ranks 4 and 7 share layers .--tensor-model-parallel-size 2. and samples .--context-parallel-size 2., but",
        ),
        (Grid(8, 8, 2, 2, 2), 4, "ranks 4 and 5 share layers"),
    ],
)
def test_all_ranks_that_share_samples_are_compared(grid: Grid, at: int, words: str) -> None:
    check = same_samples_check(engine_of(batch(shift=1), at, [], grid))
    assert check is not None
    with pytest.raises(RuntimeError, match=words):
        check(batch())


def test_labels_count_as_well_as_tokens() -> None:
    assert checksum(batch()) != checksum(replace(batch(), labels=TOKENS))


def test_ranks_of_other_data_ranks_have_other_samples() -> None:
    grid = Grid(4, 4, 4, 1)
    assert same_samples_check(engine_of(batch(), 0, [], grid)) is None
    for other in (GRID, Grid(8, 8, 2, 2, 2)):
        check = same_samples_check(engine_of(batch(), 0, [], other))
        assert check is not None
        check(batch())


def test_only_the_first_micro_batch_is_compared() -> None:
    class Samples:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            tokens = TOKENS[0].numpy() + index
            return {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(6).numpy()}

    seen: list[int] = []
    rules = DocumentRules(eod=0, resets_positions=False, resets_attention=False, masks_loss=False)
    batches = MicroBatches(Samples(), MicroBatchSampler(8, 2, 1, 0, 1), 0, rules, lambda batch: seen.append(batch.first_sample))
    assert [next(batches).first_sample for _ in range(3)] == [2, 3, 4]
    assert seen == [2]
