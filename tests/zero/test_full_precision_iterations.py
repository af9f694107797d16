from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from harness.codes import LinkBits, bits_of
from harness.seen_weights import WholeWorld, watch
from harness.small_engine import LEARNING_RATE, Job, ModelShape, Rank, train_world
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import Code, LinkCodes
from megatron_zpp.comm.ledger import Category
from megatron_zpp.zero.policy import (
    POLICIES,
    Policy,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
    with_weight_differences,
)

pytestmark = pytest.mark.virtual

QUANTIZED = with_quantized_gradients(with_quantized_weights(POLICIES[3]))
ROWS: dict[str, Policy] = {
    "stage 1": with_quantized_gradients(with_quantized_weights(POLICIES[1])),
    "stage 2": with_quantized_gradients(with_quantized_weights(POLICIES[2])),
    "stage 3": QUANTIZED,
    "stage 3, hpZ": with_secondary_weights(QUANTIZED),
}
DIFFERENCES: dict[str, Policy] = {
    "stage 3, differences": with_quantized_gradients(with_weight_differences(with_secondary_weights(POLICIES[3]), Code(4))),
    "stage 1, differences": with_quantized_gradients(with_weight_differences(POLICIES[1], Code(4))),
}
EXACT_STEPS, STEPS = 2, 4
History = list[tuple[float, float]]


def _job(row: str, microbatches: int = 1) -> Job:
    return Job((ROWS | DIFFERENCES)[row], torch.bfloat16, ModelShape((17,)), STEPS, microbatches, full_precision_iterations=EXACT_STEPS)


def _train(rank: Rank, first: int, last: int, skipped: tuple[int, ...] = ()) -> History:
    """Steps [first, last); those of `skipped` meet an inf in a gradient of one rank."""
    history = []
    for step in range(first, last):
        total = 0.0
        for microbatch in range(rank.job.microbatches):
            loss = rank.loss(step, microbatch)
            total += loss.item()
            rank.backward(loss * float("inf") if step in skipped and rank.backend.rank == 1 else loss, microbatch)
        result = rank.engine.step(LEARNING_RATE)
        assert result.is_skipped == (step in skipped)
        history.append((total, result.grad_norm if not result.is_skipped else 0.0))
    return history


def _copy_state(source: Rank, target: Rank, iteration: int) -> None:
    """What a checkpoint carries from one run to the next."""
    for unit, other in zip(source.engine.units, target.engine.units, strict=True):
        other.main_weight.copy_(unit.main_weight)
    for moment, other_moment in zip(source.engine.optimizer.live_tensors(), target.engine.optimizer.live_tensors(), strict=True):
        other_moment.copy_(moment)
    target.engine.optimizer.resume(source.engine.optimizer.steps, {})
    target.engine.weights_changed()
    target.engine.start_iteration(iteration)


@pytest.mark.parametrize("world, row", [*(((2, 2), row) for row in ROWS), ((1, 2), "stage 1"), ((1, 2), "stage 3, hpZ")], ids=str)
def test_the_first_iterations_are_those_of_plain_zero_and_the_later_ones_are_not(world: tuple[int, int], row: str) -> None:
    job = _job(row, microbatches=2)
    plain = dataclasses.replace(job, policy=job.policy.in_full_precision(), full_precision_iterations=0)
    histories, expected = train_world(world, job), train_world(world, plain)
    assert [history[:EXACT_STEPS] for history in histories] == [history[:EXACT_STEPS] for history in expected]
    assert all(history[EXACT_STEPS][0] != other[EXACT_STEPS][0] for history, other in zip(histories, expected, strict=True))
    assert len({tuple(norm for _, norm in history) for history in histories}) == 1


@pytest.mark.parametrize("row", list(DIFFERENCES))
def test_a_copy_that_takes_differences_is_exact_in_the_iteration_of_the_switch(row: str) -> None:
    job = dataclasses.replace(_job(row), policy=dataclasses.replace(DIFFERENCES[row], gradient_codes=LinkCodes()))
    plain = dataclasses.replace(job, policy=job.policy.in_full_precision(), full_precision_iterations=0)
    histories, expected = train_world((2, 2), job), train_world((2, 2), plain)
    assert [history[: EXACT_STEPS + 1] for history in histories] == [history[: EXACT_STEPS + 1] for history in expected]
    assert all(history[-1][0] != other[-1][0] for history, other in zip(histories, expected, strict=True))


# Each row with one of them; with the other too: long.
@pytest.mark.parametrize(
    "row, skipped",
    [
        pytest.param(row, skipped, marks=[pytest.mark.long] if (number + turn) % 2 else [])
        for number, row in enumerate([*ROWS, *DIFFERENCES])
        for turn, skipped in enumerate([(), (EXACT_STEPS - 1,)])
    ],
    ids=str,
)
def test_the_later_iterations_are_those_of_a_run_that_resumes_there(row: str, skipped: tuple[int, ...]) -> None:
    """After a skipped step the main weights are those from before it, but no payload in the old codec may serve again."""

    def program(backend: VirtualBackend, is_resumed: bool) -> History:
        rank = Rank(_job(row), backend)
        history = _train(rank, 0, EXACT_STEPS, skipped)
        if is_resumed:
            rank.engine.close()
            before, rank = rank, Rank(_job(row), backend)
            _copy_state(before, rank, EXACT_STEPS)
        history += _train(rank, EXACT_STEPS, STEPS)
        rank.engine.close()
        return history

    through = run_world((2, 2), lambda backend: program(backend, is_resumed=False))
    assert run_world((2, 2), lambda backend: program(backend, is_resumed=True)) == through


@pytest.mark.parametrize("row", ["stage 1", "stage 3, hpZ"])
def test_a_run_that_resumes_within_the_first_iterations_goes_on_in_full_precision(row: str) -> None:
    def program(backend: VirtualBackend) -> History:
        rank = Rank(_job(row), backend)
        history = _train(rank, 0, 1)
        rank.engine.close()
        resumed = Rank(_job(row), backend)
        _copy_state(rank, resumed, 1)
        history += _train(resumed, 1, STEPS)
        resumed.engine.close()
        return history

    assert run_world((2, 2), program) == run_world((2, 2), lambda backend: _closed(Rank(_job(row), backend)))


def test_an_engine_that_is_set_back_to_its_start_is_exact_again() -> None:
    def program(backend: VirtualBackend) -> tuple[History, History]:
        rank = Rank(_job("stage 3"), backend)
        first = _train(rank, 0, STEPS)
        fresh = Rank(_job("stage 3"), backend)
        fresh.engine.close()
        _copy_state(fresh, rank, 0)
        again = _train(rank, 0, STEPS)
        rank.engine.close()
        return first, again

    assert all(first == again for first, again in run_world((2, 2), program))


def _closed(rank: Rank) -> History:
    history = _train(rank, 0, STEPS)
    rank.engine.close()
    return history


# Each row with one of them: no step is skipped, the last one in full precision, or that and the next.
@pytest.mark.parametrize("row, skipped", list(zip(ROWS, [(), (1, 2), (1,), (1, 2)], strict=True)), ids=str)
def test_every_rank_reads_weights_in_the_new_codec_from_the_switch_on(row: str, skipped: tuple[int, ...]) -> None:
    whole = WholeWorld(4)

    def program(backend: VirtualBackend) -> None:
        rank = Rank(_job(row), backend)
        whole.join(rank)
        step = 0

        def check(phase: str, unit: str, values: Tensor) -> None:
            bits = LinkBits() if step < EXACT_STEPS else bits_of(rank.job.policy.weight_codes)
            assert torch.equal(values, whole.working_weights(unit, bits)), (step, phase, unit)

        watch(rank, check)
        for step in range(STEPS):
            with torch.no_grad():
                rank.loss(40)
            _train(rank, step, step + 1, skipped)
        rank.engine.close()

    run_world((2, 2), program)


# Each row with one of them.
@pytest.mark.parametrize("row, skipped", [(row, [(), (EXACT_STEPS - 1,)][index % 2]) for index, row in enumerate(ROWS)], ids=str)
def test_bytes_fall_on_every_rank_from_the_switch_on(row: str, skipped: tuple[int, ...]) -> None:
    def program(backend: VirtualBackend) -> list[int]:
        rank = Rank(_job(row), backend)
        totals = [0]
        for step in range(STEPS):
            _train(rank, step, step + 1, skipped)
            totals.append(rank.ledger.total(Category.WEIGHTS, Category.GRADIENTS).inter_bytes)
        rank.engine.close()
        return [later - earlier for earlier, later in itertools.pairwise(totals)]

    by_rank = run_world((2, 2), program)
    assert all(by_step == by_rank[0] for by_step in by_rank)
    exact, quantized = by_rank[0][:EXACT_STEPS], by_rank[0][EXACT_STEPS:]
    assert len(set(exact)) == len(set(quantized)) == 1
    assert quantized[0] < 0.8 * exact[0]


def test_zero_first_iterations_quantize_from_the_start() -> None:
    job = Job(QUANTIZED, torch.bfloat16, ModelShape((17,)), steps=2)
    first = train_world((2, 2), job)[0][0][0]
    assert first != train_world((2, 2), dataclasses.replace(job, policy=POLICIES[3]))[0][0][0]
