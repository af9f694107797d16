"""A GPT whose samples ranks share, under the engine: the same bits in every row, and the losses of ranks with whole samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.divided_gpt import CLIPS, FULL, ROWS, same_bits, train_gpt
from harness.small_engine import Job, mean_losses

from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import POLICIES

pytestmark = pytest.mark.virtual


def whole_samples(grid: Grid) -> Grid:
    """With the same data ranks, each of which has samples of its own."""
    return replace(grid, context_ranks=1)


# With each row, how it recomputes.
RECOMPUTED: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 1": FULL,
    "stage 2": {"recompute_granularity": "selective"},
    "stage 3": FULL | {"recompute_num_layers": 2},
    "hpZ": {},
}


# Every stage on one grid, and some of them on every other; context groups inside a node and over nodes.
@pytest.mark.parametrize(
    "gpt, grid, sequence_parallel, rows",
    [
        ("GPT-2", Grid.of_nodes(2, 2, 1, 2), False, list(RECOMPUTED)),
        ("Llama 3", Grid.of_nodes(2, 2, 1, 4), False, ["stage 2", "stage 3"]),
        ("Qwen3, tied", Grid.of_nodes(2, 2, 2, 2), True, ["stage 0", "hpZ"]),
        ("one key head, every bias", Grid.of_nodes(2, 4, 2, 4), False, ["stage 1", "hpZ"]),
    ],
    ids=str,
)
def test_every_stage_gives_the_same_bits_with_and_without_recomputation(
    gpt: str, grid: Grid, sequence_parallel: bool, rows: list[str]
) -> None:
    job, flags = Job(steps=2, clip_grad=CLIPS), {"sequence_parallel": sequence_parallel, "hidden_dropout": 0.1}
    first, *others = (train_gpt(grid, replace(job, policy=ROWS[row]), gpt, **flags, **RECOMPUTED[row]) for row in rows)
    assert all(same_bits(other, first) for other in others)
    assert all(norm > CLIPS for _, norm in first.histories[0])


@pytest.mark.parametrize(
    "gpt, grid, sequence_parallel, changes",
    [
        ("GPT-2", Grid.of_nodes(1, 2, 1, 2), False, {"hidden_dropout": 0.1}),
        ("Llama 3", Grid.of_nodes(2, 2, 1, 4), False, FULL),
        ("Qwen3, tied", Grid.of_nodes(1, 4, 2, 2), True, {"hidden_dropout": 0.1}),
        pytest.param(
            "one key head, every bias", Grid.of_nodes(2, 4, 2, 4), False, {"recompute_granularity": "selective"}, marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_losses_norms_and_first_weights_are_those_of_whole_samples(
    gpt: str, grid: Grid, sequence_parallel: bool, changes: dict[str, Any]
) -> None:
    """Over 2 steps at a rate of 1e-3 in fp32: gradients are added over tokens in another order."""
    job = Job(POLICIES[3], steps=2, microbatches=2, clip_grad=CLIPS)
    shared, alone = (
        train_gpt(each, job, gpt, sequence_parallel=sequence_parallel, rate=1e-3, **changes) for each in (grid, whole_samples(grid))
    )
    assert mean_losses(shared.histories) == pytest.approx(mean_losses(alone.histories), rel=1e-6)
    assert [norm for _, norm in shared.histories[0]] == pytest.approx([norm for _, norm in alone.histories[0]], rel=2e-5)


@pytest.mark.parametrize(
    "row, gpt, grid, sequence_parallel",
    [
        ("qwZ", "GPT-2", Grid.of_nodes(2, 2, 1, 2), False),
        ("qgZ", "Llama 3", Grid.of_nodes(2, 2, 1, 4), False),
        ("paper", "Llama 3", Grid.of_nodes(2, 4, 2, 2), True),
        ("lean", "Qwen3, tied", Grid.of_nodes(2, 4, 2, 4), False),
    ],
)
def test_rows_with_codes_train_on_shared_samples_like_on_whole_ones(row: str, gpt: str, grid: Grid, sequence_parallel: bool) -> None:
    job = Job(ROWS[row], torch.bfloat16, block_numel=256)
    shared = train_gpt(grid, job, gpt, sequence_parallel=sequence_parallel)
    alone = train_gpt(Grid.of_nodes(1, 1), Job(POLICIES[3], torch.bfloat16), gpt)
    assert mean_losses(shared.histories) == pytest.approx(mean_losses(alone.histories), rel=0.02)


def test_in_16_bits_the_bits_depend_on_neither_stage_nor_recomputation() -> None:
    grid, changes = Grid.of_nodes(2, 4, 2, 2), {"hidden_dropout": 0.1}
    first, *others = (
        train_gpt(grid, Job(ROWS[row], torch.bfloat16, steps=2), "Llama 3", sequence_parallel=True, **changes | change)
        for row, change in (("stage 0", {}), ("stage 2", FULL), ("hpZ", {"recompute_granularity": "selective"}))
    )
    assert all(same_bits(other, first) for other in others)
