"""A GPT whose layers tensor ranks share, under the engine: the same bits in every row, and the losses of one tensor rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.divided_gpt import CLIPS, FULL, LEAN, ROWS, GptRank, same_bits, train_gpt
from harness.divided_model import bits_of
from harness.small_engine import LEARNING_RATE, Job, mean_losses
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.shared_gradients import shared_places

pytestmark = pytest.mark.virtual


def one_tensor_rank(grid: Grid) -> Grid:
    ladder = grid.ladder
    return Grid(ladder.data_ranks, ladder.ranks_per_node, ladder.partition_ranks)


# Every row, number of tensor ranks, order of tokens and kind of model is in some case.
@pytest.mark.parametrize(
    "gpt, grid, sequence_parallel, rows",
    [
        ("GPT-2", Grid.of_nodes(2, 2, 2), False, ("stage 0", "stage 1", "stage 3")),
        ("Qwen3, tied", Grid.of_nodes(2, 4, 2), True, ("stage 2", "hpZ")),
        ("Llama 3", Grid.of_nodes(2, 4, 4), True, ("stage 0", "stage 3")),
        ("one key head, every bias", Grid.of_nodes(1, 4, 4), False, ("stage 0", "stage 2")),
        ("Llama 3", Grid.of_nodes(2, 2), False, ("stage 0", "stage 3")),
    ],
    ids=str,
)
def test_every_row_gives_the_same_bits_with_and_without_recomputation(
    gpt: str, grid: Grid, sequence_parallel: bool, rows: tuple[str, ...]
) -> None:
    first, *others = (
        train_gpt(grid, Job(ROWS[row], steps=2, clip_grad=CLIPS), gpt, sequence_parallel=sequence_parallel, hidden_dropout=0.1, **changes)
        for row, changes in zip(rows, ({}, FULL, {}), strict=False)
    )
    assert all(same_bits(other, first) for other in others)
    assert all(norm > CLIPS for _, norm in first.histories[0])


@pytest.mark.parametrize(
    "gpt, grid, sequence_parallel, changes",
    [
        ("GPT-2", Grid.of_nodes(1, 4, 2), False, {}),
        ("Qwen3, tied", Grid.of_nodes(1, 4, 4), True, {"hidden_dropout": 0.1}),
        ("Llama 3", Grid.of_nodes(1, 2, 2), True, FULL),
        ("one key head, every bias", Grid.of_nodes(1, 4, 4), False, {}),
    ],
    ids=str,
)
def test_losses_norms_and_first_weights_are_those_of_one_tensor_rank(
    gpt: str, grid: Grid, sequence_parallel: bool, changes: dict[str, Any]
) -> None:
    """Over 3 steps at a rate of 1e-3 in fp32: sums over tensor ranks are taken in another order."""
    job = Job(POLICIES[3], clip_grad=CLIPS)
    divided = train_gpt(grid, job, gpt, sequence_parallel=sequence_parallel, rate=1e-3, **changes)
    alone = train_gpt(one_tensor_rank(grid), job, gpt, rate=1e-3, **changes)
    assert mean_losses(divided.histories) == pytest.approx(mean_losses(alone.histories), rel=1e-6)
    assert [norm for _, norm in divided.histories[0]] == pytest.approx([norm for _, norm in alone.histories[0]], rel=2e-5)
    first, first_alone = (train_gpt(each, Job(steps=0), gpt).state for each in (grid, one_tensor_rank(grid)))
    assert first.keys() == first_alone.keys()
    assert all(torch.equal(bits_of(values), bits_of(first_alone[key])) for key, values in first.items())


@pytest.mark.parametrize(
    "row, gpt, grid, sequence_parallel",
    [
        ("paper", "Llama 3", Grid.of_nodes(2, 4, 2), True),
        ("lean", "Qwen3, tied", Grid.of_nodes(2, 4, 2), False),
        pytest.param("lean", "GPT-2", Grid.of_nodes(2, 4, 2), True, marks=pytest.mark.long),
    ],
)
def test_rows_with_codes_train_a_divided_gpt_like_a_whole_one(row: str, gpt: str, grid: Grid, sequence_parallel: bool) -> None:
    job = Job(ROWS[row], torch.bfloat16, steps=3, microbatches=2, block_numel=256)
    divided = train_gpt(grid, job, gpt, sequence_parallel=sequence_parallel)
    alone = train_gpt(one_tensor_rank(grid), Job(POLICIES[3], torch.bfloat16, steps=3, microbatches=2), gpt)
    assert mean_losses(divided.histories) == pytest.approx(mean_losses(alone.histories), rel=0.02)


@pytest.mark.parametrize("kv_channels, is_alone", [(8, True), (6, False)])
def test_kept_copies_of_shared_rows_are_equal_if_blocks_have_no_other_elements(kv_channels: int, is_alone: bool) -> None:
    """Pairs of ranks have a key and a value of `kv_channels` rows of 16; blocks have 256. Else copies differ by what codes lose."""

    def program(backend: VirtualBackend) -> tuple[list[Tensor], list[Tensor]]:
        """The shared rows of this rank's slices: of the copies, and of the main weights."""
        rank = GptRank(Job(LEAN, torch.bfloat16, steps=3, block_numel=256), backend, gpt="Llama 3", changes={"kv_channels": kv_channels})
        rank.train()
        rank.engine.finish_differences()
        copies, weights = [], []
        for sharing, places in shared_places([unit.layout for unit in rank.engine.units], rank.engine.links.own_slice, 1, 4).items():
            for place in places if len(sharing.holders[0]) == 2 else ():
                unit = rank.engine.units[place.unit]
                assert unit.kept is not None
                copies.append(unit.kept.own.range(place.start, place.stop).clone())
                weights.append(unit.main_regions().range(place.start, place.stop).clone())
        return copies, weights

    ranks = run_world(Grid.of_nodes(2, 4, 4), program)
    differences = []
    for (copies, weights), (other_copies, other_weights) in zip(ranks[::2], ranks[1::2], strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, other_weights, strict=True))
        differences += [float((mine - theirs).abs().max()) for mine, theirs in zip(copies, other_copies, strict=True)]
    assert len(differences) >= 4  # of two blocks in two groups
    assert all(difference == 0 for difference in differences) == is_alone
    assert max(differences) < 3 * LEARNING_RATE  # what three steps of Adam move a weight; most of it has arrived in both copies
