from __future__ import annotations

import dataclasses

import pytest
import torch
from harness.scheduled_units import INTER_CLIMB, INTRA_CLIMB, ScheduledUnits, Submission, backward_moments, forward_moments
from harness.small_engine import SECONDARY_ROW, Job, ModelShape, Rank
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.parallel.specs import Use
from megatron_zpp.parallel.topology import Direction, Lane, Link
from megatron_zpp.zero.policy import POLICIES, Rung
from megatron_zpp.zero.schedule import Prefetch, descent_order, evaluation_schedule, training_schedule

pytestmark = pytest.mark.virtual

INTRA_DESCEND, INTER_DESCEND = Lane(Link.INTRA, Direction.DESCEND), Lane(Link.INTER, Direction.DESCEND)
KEEPS_SECONDARY = dataclasses.replace(POLICIES[3], weights_in_step=Rung.SECONDARY)
ROWS = {"stage 1": POLICIES[1], "stage 2": POLICIES[2], "stage 3": POLICIES[3], "hpz": KEEPS_SECONDARY, "secondary row": SECONDARY_ROW}


def _implied(job: Job, uses: tuple[Use, ...], has_evaluations: bool) -> list[Submission]:
    units = ScheduledUnits(uses, job.policy.weights_in_step)
    training, evaluation = training_schedule(uses, job.prefetch), evaluation_schedule(uses, job.prefetch)
    forward, backward = forward_moments(uses), backward_moments(uses)
    for _ in range(job.steps):
        for microbatch in range(job.microbatches):
            if has_evaluations:
                units.run(evaluation, forward)
            units.run(training, forward)
            if has_evaluations:
                units.run(evaluation, forward)
            units.run(training, backward)
            if microbatch < job.microbatches - 1:
                units.submit(training, forward[0])
        units.weights_changed()
        units.submit(training, forward[0])
    return units.submissions


def _recorded(job: Job, has_evaluations: bool) -> tuple[list[list[Submission]], tuple[Use, ...]]:
    def program(backend: VirtualBackend) -> tuple[list[Submission], tuple[Use, ...]]:
        rank = Rank(job, backend)
        for step in range(job.steps):
            for microbatch in range(job.microbatches):
                rank.backward(_loss(rank, step, microbatch, has_evaluations), microbatch)
            rank.engine.step(1e-2)
        rank.engine.close()
        return rank.lanes.submissions, rank.model.uses()

    results = run_world((2, 2), program)
    return [submissions for submissions, _ in results], results[0][1]


def _loss(rank: Rank, step: int, microbatch: int, has_evaluations: bool) -> Tensor:
    if has_evaluations:
        with torch.no_grad():
            rank.loss(77)
    loss = rank.loss(step, microbatch)
    if has_evaluations:
        with torch.no_grad():
            rank.loss(78)
    return loss


MODELS = {
    "default prefetch, tied, kept": (Prefetch(), ModelShape((5, 11, 2))),
    "default prefetch, untied, recomputed": (Prefetch(), ModelShape((5, 11, 2), is_tied=False, is_recomputed=True)),
    "no prefetch, tied, recomputed": (Prefetch(0, 0), ModelShape((5, 11, 2), is_recomputed=True)),
    "long prefetch, untied, kept": (Prefetch(3, 2), ModelShape((5, 11, 2), is_tied=False)),
}


# Every row with two models, one of them with evaluations in between, and so every model with and without them.
@pytest.mark.parametrize(
    "row, model, has_evaluations",
    [(row, list(MODELS)[(index - turn) % 4], turn == 1) for index, row in enumerate(ROWS) for turn in (0, 1)],
    ids=str,
)
def test_the_engine_submits_exactly_the_climbs_that_the_schedule_implies(row: str, has_evaluations: bool, model: str) -> None:
    prefetch, shape = MODELS[model]
    job = Job(ROWS[row], shape=shape, steps=2, microbatches=2, prefetch=prefetch)
    recorded, uses = _recorded(job, has_evaluations)
    implied = _implied(job, uses, has_evaluations)
    for submissions in recorded:
        assert [each for each in submissions if each[1].direction is Direction.CLIMB] == implied


def test_the_first_climbs_of_the_next_micro_batch_are_submitted_at_the_end_of_backward() -> None:
    def program(backend: VirtualBackend) -> list[Submission]:
        rank = Rank(Job(POLICIES[3], microbatches=2), backend)
        rank.backward(rank.loss(0), 0)
        submissions = list(rank.lanes.submissions)
        rank.engine.close()
        return submissions

    for submissions in run_world((2, 2), program):
        last_descent = max(index for index, (_, lane) in enumerate(submissions) if lane.direction is Direction.DESCEND)
        assert ("embedding", INTRA_CLIMB) in submissions[last_descent:]


@pytest.mark.parametrize("row, is_tied", [("stage 2", True), ("stage 3", False), ("hpz", True)])
def test_gradients_on_the_primary_rung_descend_unit_by_unit_over_both_links_in_every_micro_batch(row: str, is_tied: bool) -> None:
    job = Job(ROWS[row], shape=ModelShape(is_tied=is_tied), steps=2, microbatches=2)
    recorded, uses = _recorded(job, has_evaluations=False)
    one = [(unit, lane) for unit in descent_order(uses) for lane in (INTRA_DESCEND, INTER_DESCEND)]
    for submissions in recorded:
        assert [each for each in submissions if each[1].direction is Direction.DESCEND] == one * 4


def test_gradients_on_the_secondary_rung_cross_the_inter_link_in_the_last_micro_batch_only() -> None:
    job = Job(SECONDARY_ROW, steps=2, microbatches=2)
    recorded, uses = _recorded(job, has_evaluations=False)
    order = descent_order(uses)
    within = [(unit, INTRA_DESCEND) for unit in order]
    both = [(unit, lane) for unit in order for lane in (INTRA_DESCEND, INTER_DESCEND)]
    for submissions in recorded:
        assert [each for each in submissions if each[1].direction is Direction.DESCEND] == (within + both) * 2


def test_data_parallel_gradients_descend_and_climb_back_in_the_last_micro_batch_only() -> None:
    job = Job(POLICIES[0], steps=2, microbatches=2)
    recorded, uses = _recorded(job, has_evaluations=True)
    one = [(unit, lane) for unit in descent_order(uses) for lane in (INTRA_DESCEND, INTER_DESCEND, INTER_CLIMB, INTRA_CLIMB)]
    assert all(submissions == one * 2 for submissions in recorded)


@pytest.mark.parametrize("row", list(ROWS))
def test_every_rank_submits_the_same_list_also_where_a_parameter_has_no_gradient_on_some(row: str) -> None:
    def program(backend: VirtualBackend) -> list[Submission]:
        rank = Rank(Job(ROWS[row], shape=ModelShape(has_spare=True), steps=1), backend, uses_spare=backend.rank == 2)
        rank.train()
        return rank.lanes.submissions

    first, *others = run_world((2, 2), program)
    assert all(submissions == first for submissions in others)
