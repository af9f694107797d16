"""Ladders beside each other in one world, each with the whole model: each trains as if it were alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from harness.codes import CodeOptions, LinkBits
from harness.small_engine import ROWS, Job, ModelShape, Rank, bytes_by_step
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.norms import count_zeros
from megatron_zpp.zero.policy import POLICIES, ZEROPP

pytestmark = pytest.mark.virtual

STOCHASTIC = dataclasses.replace(ZEROPP, gradient_codes=LinkBits(4, 4).codes(CodeOptions(is_rotated=True, is_stochastic=True)))
POLICY_OF = {**ROWS, "ZeRO++": ZEROPP, "ZeRO++, stochastic": STOCHASTIC}
GRIDS = [
    Grid.of_nodes(1, 2, tensor_ranks=2),
    Grid.of_nodes(2, 4, tensor_ranks=2),
    Grid(4, 4, 1, tensor_ranks=2),
    Grid(6, 3, 1, tensor_ranks=3),
]


def one_ladder(grid: Grid) -> Grid:
    ladder = grid.ladder
    return Grid(ladder.data_ranks, ladder.ranks_per_node, ladder.partition_ranks)


def of_ranks(grid: Grid, of_data_ranks: list[object]) -> list[object]:
    """What every rank has, if each ladder has the same."""
    return [of_data_ranks[grid.data_rank_of(rank)] for rank in range(grid.world_size)]


# Every row, and every grid with one row.
@pytest.mark.parametrize(
    "grid, row",
    [
        *((GRIDS[1] if index > 3 else Grid.of_nodes(2, 2, 2), row) for index, row in enumerate(POLICY_OF)),
        *((grid, "ZeRO++, stochastic") for grid in GRIDS if grid is not GRIDS[1]),
    ],
    ids=str,
)
def test_each_of_some_ladders_beside_each_other_trains_with_the_bits_of_one_alone(grid: Grid, row: str) -> None:
    def program(backend: VirtualBackend) -> tuple[list[tuple[float, float]], dict[str, list[tuple[int, Tensor]]]]:
        rank = Rank(job, backend)
        return rank.train(), rank.own_main_weights()

    job = Job(POLICY_OF[row], torch.bfloat16, microbatches=2, steps=2)
    beside, alone = run_world(grid, program), run_world(one_ladder(grid), program)
    assert all(norm > job.clip_grad for _, norm in alone[0][0])  # clipping is active
    for (history, weights), (expected, expected_weights) in zip(beside, of_ranks(grid, alone), strict=True):
        assert history == expected
        assert weights.keys() == expected_weights.keys()
        for name, pieces in weights.items():
            assert [start for start, _ in pieces] == [start for start, _ in expected_weights[name]]
            assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(pieces, expected_weights[name], strict=True))


@pytest.mark.parametrize(
    "grid, row", [(GRIDS[0], "stage 1"), (GRIDS[1], "stage 0"), (GRIDS[1], "ZeRO++"), (GRIDS[2], "stage 2"), (GRIDS[3], "stage 3")], ids=str
)
def test_ladders_beside_each_other_multiply_the_bytes_of_a_node_and_not_those_of_a_rank(grid: Grid, row: str) -> None:
    job = Job(POLICY_OF[row], torch.bfloat16, microbatches=2, steps=2)
    alone = [[(grid.tensor_ranks * into_node, within) for into_node, within in steps] for steps in bytes_by_step(one_ladder(grid), job)]
    assert bytes_by_step(grid, job) == of_ranks(grid, alone)


def test_an_overflow_on_one_ladder_skips_the_step_on_all() -> None:
    def program(backend: VirtualBackend) -> list[bool]:
        rank = Rank(Job(), backend, shares=False)
        skipped = []
        for step, bad_rank in enumerate((None, 3)):
            loss = rank.loss(step)
            rank.backward(loss * math.inf if backend.rank == bad_rank else loss)
            skipped.append(rank.engine.step(1e-2).is_skipped)
        rank.engine.close()
        return skipped

    assert run_world(GRIDS[1], program) == [[False, True]] * GRIDS[1].world_size


@pytest.mark.parametrize("row", ["stage 0", "stage 3"])
def test_norms_and_zeros_count_what_each_ladder_holds_and_what_they_share_once(row: str) -> None:
    def program(backend: VirtualBackend, shares: bool) -> tuple[float, int]:
        rank = Rank(Job(POLICIES[int(row[-1])], shape=ModelShape(has_spare=True)), backend, shares=shares)
        rank.accumulate(0)
        rank.engine.finish_gradients()
        zeros = count_zeros(rank.engine.gradients, rank.engine.links)
        if backend.grid.tensor_rank_of(backend.rank) == 1 and not shares:
            for unit in rank.engine.units:
                unit.main_weight.mul_(2.0)
        norm = rank.engine.weight_norm()
        rank.engine.close()
        return norm, zeros

    grid = GRIDS[1]
    ((alone, zeros_alone), *_) = run_world(one_ladder(grid), lambda backend: program(backend, True))
    assert zeros_alone > 0
    assert run_world(grid, lambda backend: program(backend, True)) == [(alone, zeros_alone)] * grid.world_size
    for norm, zeros in run_world(grid, lambda backend: program(backend, False)):
        assert norm == pytest.approx(math.sqrt(1 + 4) * alone, rel=1e-12)  # some thousand fp64 additions in another order
        assert zeros == 2 * zeros_alone
