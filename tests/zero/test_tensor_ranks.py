"""Runs in which tensor ranks share a small model: the same bits in every row at each number of them. test_divided_gpt.py has a GPT."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from harness.codes import CodeOptions, LinkBits, lean
from harness.divided_model import SHAPE, DividedRank, History, Trained, bits_of, train_divided
from harness.small_engine import SECONDARY_ROW, Job, ModelShape, RecordingLanes, mean_losses, random_pauses
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import (
    POLICIES,
    ZEROPP,
    Policy,
    Rung,
    with_gradients_summed_on_secondary,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
)
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

HPZ = with_secondary_weights(POLICIES[3])
EXACT_ROWS = {**{f"stage {stage}": policy for stage, policy in POLICIES.items()}, "hpZ": HPZ, "secondary row": SECONDARY_ROW}
GRIDS = {
    "1 x 2, T = 2": (Grid.of_nodes(1, 2, 2), 1),
    "1 x 4, T = 2": (Grid.of_nodes(1, 4, 2), 2),
    "2 x 2, T = 2": (Grid.of_nodes(2, 2, 2), 1),
    "2 x 4, T = 2": (Grid.of_nodes(2, 4, 2), 1),
    "2 x 4, T = 2, partitions of one": (Grid(8, 4, 1, 2), 2),
    "2 x 4, T = 4": (Grid.of_nodes(2, 4, 4), 2),
    "2 x 3, T = 3": (Grid.of_nodes(2, 3, 3), 1),
}


def of_one_tensor_rank(grid: Grid) -> Grid:
    ladder = grid.ladder
    return Grid(ladder.data_ranks, ladder.ranks_per_node, ladder.partition_ranks)


trained = cache(train_divided)


def same_bits(one: Trained, other: Trained) -> bool:
    states = all(torch.equal(bits_of(values), bits_of(other.state[key])) for key, values in one.state.items())
    return one.histories == other.histories and states


# Every row, and some of them with every grid, two in bf16. States show what two steps did.
@pytest.mark.parametrize(
    "grid, dtype, rows",
    [
        ("2 x 4, T = 2", torch.float32, ["stage 0", "stage 3", "hpZ", "secondary row"]),
        ("2 x 2, T = 2", torch.float32, ["stage 0", "stage 1", "stage 2"]),
        ("1 x 2, T = 2", torch.float32, ["stage 0", "stage 1", "stage 3"]),
        ("1 x 4, T = 2", torch.bfloat16, ["stage 0", "stage 2", "stage 3"]),
        ("2 x 4, T = 2, partitions of one", torch.float32, ["stage 0", "hpZ"]),
        ("2 x 4, T = 4", torch.bfloat16, ["stage 0", "hpZ"]),
        ("2 x 3, T = 3", torch.float32, ["stage 0", "stage 3"]),
    ],
    ids=str,
)
def test_every_row_gives_the_same_bits_at_each_number_of_tensor_ranks(grid: str, dtype: torch.dtype, rows: list[str]) -> None:
    shape, groups = GRIDS[grid]
    runs = [trained(shape, Job(EXACT_ROWS[row], dtype, SHAPE, steps=2), groups) for row in rows]
    assert all(same_bits(run, runs[0]) for run in runs[1:])
    assert all(norm > Job().clip_grad for _, norm in runs[0].histories[0])  # clipping is active
    for rank, history in enumerate(runs[0].histories):
        assert history == runs[0].histories[shape.rank_of(shape.data_rank_of(rank), 0)]  # ranks that share a layer have the same loss


@pytest.mark.parametrize("row", ["stage 0", "hpZ"])
def test_bits_depend_on_neither_prefetch_nor_delays_of_single_ranks(row: str) -> None:
    grid, groups = GRIDS["2 x 4, T = 2" if row == "hpZ" else "1 x 4, T = 2"]
    job = Job(EXACT_ROWS[row], shape=ModelShape((12, 48)), microbatches=2, steps=2)

    def delayed(backend: VirtualBackend) -> History:
        return DividedRank(job, backend, RecordingLanes(random_pauses(backend.rank)), groups=groups).train()

    expected = trained(grid, job, groups)
    if row == "hpZ":  # in stage 0 nothing climbs
        assert same_bits(trained(grid, dataclasses.replace(job, prefetch=Prefetch(0, 0)), groups), expected)
    assert run_world(grid, delayed, takes_turns=False) == expected.histories


STOCHASTIC = LinkBits(4, 4).codes(CodeOptions(is_rotated=True, is_stochastic=True))
LEAN = lean(3, bits=2)
CODED_ROWS: dict[str, Policy] = {
    "qwZ and qgZ, stage 2": with_quantized_gradients(with_quantized_weights(POLICIES[2])),
    "ZeRO++, summed on secondary, rotated and rounded at random": with_gradients_summed_on_secondary(
        with_quantized_gradients(ZEROPP, STOCHASTIC)
    ),
    "lean": with_gradients_summed_on_secondary(LEAN),
    "lean, stage 1": lean(1, bits=2),
}


@pytest.mark.parametrize("row", CODED_ROWS)
def test_every_row_with_codes_trains_like_one_tensor_rank_without_and_leaves_what_ranks_share_equal(row: str) -> None:
    grid, groups = GRIDS["2 x 2, T = 2" if "stage" in row else "2 x 4, T = 2"]
    is_summed = CODED_ROWS[row].gradients is Rung.SECONDARY
    job = Job(CODED_ROWS[row], torch.bfloat16, SHAPE, microbatches=1 + is_summed, block_numel=256)
    exact = dataclasses.replace(job, policy=POLICIES[3])
    divided, alone = trained(grid, job, groups), trained(of_one_tensor_rank(grid), exact, groups)
    assert mean_losses(divided.histories) == pytest.approx(mean_losses(alone.histories), rel=0.05)
