from __future__ import annotations

import dataclasses

import pytest
import torch
from harness.small_engine import (
    ROWS,
    SECONDARY_ROW,
    Job,
    ModelShape,
    Rank,
    RecordingLanes,
    mean_losses,
    random_pauses,
    train_plainly,
    train_world,
)
from harness.worlds import run_world

from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]
UNEQUAL = ModelShape(inner=(9, 50, 1))


# Every world, dtype and recomputation.
@pytest.mark.parametrize(
    "shape, dtype, is_recomputed",
    [
        ((1, 1), torch.bfloat16, True),
        ((1, 2), torch.float32, False),
        ((2, 1), torch.bfloat16, False),
        ((2, 2), torch.float32, False),
        ((3, 2), torch.bfloat16, True),
    ],
    ids=str,
)
def test_every_row_gives_the_same_bits_with_one_micro_batch(shape: tuple[int, int], dtype: torch.dtype, is_recomputed: bool) -> None:
    jobs = {name: Job(policy, dtype, ModelShape(is_recomputed=is_recomputed)) for name, policy in ROWS.items()}
    histories = {name: train_world(shape, job) for name, job in jobs.items()}
    assert all(norm > jobs["stage 0"].clip_grad for _, norm in histories["stage 0"][0])  # clipping is active
    assert all(history == histories["stage 0"] for history in histories.values())


@pytest.mark.parametrize("shape, is_tied", [((1, 2), True), ((2, 2), False)], ids=str)
def test_recomputation_and_output_tying_keep_the_bits_of_stage_0_in_stage_3(shape: tuple[int, int], is_tied: bool) -> None:
    model = ModelShape(is_tied=is_tied)
    reference = train_world(shape, Job(POLICIES[0], shape=model))
    for chunk in (1, 2):
        recomputed = dataclasses.replace(model, is_recomputed=True, chunk=chunk)
        assert train_world(shape, Job(POLICIES[3], shape=recomputed)) == reference


# Rows have the same bits with one micro-batch, so one of them stands for all there.
@pytest.mark.parametrize(
    "row, shape, microbatches",
    [
        *(("stage 3", shape, 1) for shape in SHAPES),
        *((row, (2, 2), 3) for row in ROWS),
        ("secondary row", (3, 2), 2),
    ],
    ids=str,
)
def test_losses_and_norms_are_those_of_a_plain_loop_over_the_global_batch(shape: tuple[int, int], microbatches: int, row: str) -> None:
    job = Job(ROWS[row], microbatches=microbatches)
    histories = train_world(shape, job)
    plain, _ = train_plainly(job)
    assert mean_losses(histories) == pytest.approx([loss for loss, _ in plain], rel=1e-6)
    assert [norm for _, norm in histories[0]] == pytest.approx([norm for _, norm in plain], rel=2e-5)  # fp32 sums of gradients
    assert len({tuple(norm for _, norm in history) for history in histories}) == 1


@pytest.mark.parametrize("row, shape", [*((row, (2, 2)) for row in ROWS), ("stage 3", (3, 2)), ("stage 3", (1, 1))], ids=str)
def test_the_owned_slices_of_all_ranks_are_the_weights_of_the_plain_loop(shape: tuple[int, int], row: str) -> None:
    job = Job(ROWS[row], steps=3)

    def program(backend):  # type: ignore[no-untyped-def]
        rank = Rank(job, backend)
        rank.train()
        return rank.own_main_weights()

    _, model = train_plainly(job)
    seen = {name: torch.zeros(parameter.numel()) for name, parameter in model.named_parameters()}
    weights = {name: parameter.detach().flatten() for name, parameter in model.named_parameters()}
    for pieces in run_world(shape, program):
        for name, parts in pieces.items():
            for start, values in parts:
                seen[name][start : start + values.numel()] = 1
                torch.testing.assert_close(values, weights[name][start : start + values.numel()], rtol=1e-4, atol=1e-5)
    assert all(bool(flags.all()) for flags in seen.values())


# In stage 0 nothing climbs.
@pytest.mark.parametrize("row, microbatches, steps", [("stage 3", 2, 2), ("secondary row", 1, 3)])
def test_bits_do_not_depend_on_how_far_ahead_climbs_are_submitted(row: str, microbatches: int, steps: int) -> None:
    job = Job(ROWS[row], shape=UNEQUAL, microbatches=microbatches, steps=steps)
    histories = [
        train_world((2, 2), dataclasses.replace(job, prefetch=prefetch)) for prefetch in (Prefetch(2, 1), Prefetch(0, 0), Prefetch(1, 4))
    ]
    assert all(history == histories[0] for history in histories)


@pytest.mark.parametrize("row", list(ROWS))
def test_bits_do_not_depend_on_random_delays_of_single_ranks_with_units_of_unequal_size(row: str) -> None:
    is_recomputed = row in ("stage 1", "secondary row")
    job = Job(ROWS[row], shape=dataclasses.replace(UNEQUAL, is_recomputed=is_recomputed, chunk=2), microbatches=2, steps=2)
    delayed = run_world((2, 2), lambda backend: Rank(job, backend, RecordingLanes(random_pauses(backend.rank))).train(), takes_turns=False)
    assert delayed == train_world((2, 2), job)


def test_a_secondary_rung_kept_within_the_step_changes_no_bit_for_any_number_of_micro_batches() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        kept = dataclasses.replace(POLICIES[3], weights_in_step=SECONDARY_ROW.weights_in_step)
        job = Job(POLICIES[3], dtype, microbatches=3)
        assert train_world((2, 2), job) == train_world((2, 2), dataclasses.replace(job, policy=kept))


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_may_rest_lower_within_a_step_than_a_stage_has_them_and_the_bits_stay(stage: int) -> None:
    """Rows that no flag offers."""
    row = dataclasses.replace(POLICIES[stage], weights_in_step=SECONDARY_ROW.weights_in_step)
    assert train_world((2, 2), Job(row)) == train_world((2, 2), Job(POLICIES[stage]))


@pytest.mark.parametrize("row", list(ROWS))
def test_a_run_in_bf16_learns_like_the_one_in_fp32(row: str) -> None:
    losses = {dtype: mean_losses(train_world((2, 2), Job(ROWS[row], dtype, microbatches=3))) for dtype in (torch.float32, torch.bfloat16)}
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=2e-2)  # bf16 has 8 bits: 0.4 % per rounding
