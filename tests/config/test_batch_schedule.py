"""The size of every global batch, against Megatron's rule evaluated batch by batch."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_zpp.config.batch_schedule import BatchSchedule, BatchStage, batch_schedule
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.sample_lengths import SampleLengths
from megatron_zpp.config.schema import TrainingConfig

RAMPS = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 6), st.integers(1, 400))  # start, increment, steps, samples


def ramp(start: int, increment: int, steps: int, samples: int) -> BatchSchedule:
    words = (str(start), str(increment), str(samples))
    return batch_schedule(TrainingConfig(rampup_batch_size=words, global_batch_size=start + steps * increment), SampleLengths(16))


def megatrons_size(start: int, increment: int, steps: int, samples: int, consumed: int) -> int:
    """One more increment with every samples / steps consumed samples, and the whole batch beyond the ramp."""
    if consumed > samples or steps == 0:
        return start + steps * increment
    return start + int(consumed / Fraction(samples, steps)) * increment


def walked(batches: BatchSchedule, iterations: int) -> list[int]:
    """Samples consumed before each of so many batches and after the last."""
    consumed = [0]
    for _ in range(iterations):
        consumed.append(consumed[-1] + batches.batch_size(consumed[-1]))
    return consumed


@given(RAMPS, st.integers(0, 500))
def test_a_ramp_grows_by_megatrons_rule(parts: tuple[int, int, int, int], consumed: int) -> None:
    assert ramp(*parts).batch_size(consumed) == megatrons_size(*parts, consumed)


@given(RAMPS, st.integers(1, 7), st.integers(0, 40), st.integers(0, 40))
def test_samples_and_iterations_agree_with_walking_from_batch_to_batch(
    parts: tuple[int, int, int, int], grain: int, first: int, more: int
) -> None:
    batches = replace(ramp(*parts), grain=grain, may_decrease=True)
    consumed = walked(batches, first + more)
    assert batches.samples_after(more, consumed[first]) == consumed[-1]
    for samples in (consumed[-1], consumed[-1] + batches.batch_size(consumed[-1]) - 1):
        assert batches.iterations_within(samples, consumed[first]) == more


STAGES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=5)  # samples of a stage, and its size


@given(STAGES, st.integers(0, 150), st.integers(0, 150))
@example([(8, 4), (1, 1)], 11, 0)  # a stage exactly filled, and smaller batches behind it
def test_batches_of_any_sizes_fit_as_often_as_a_loop_finds_room_for_one(parts: list[tuple[int, int]], samples: int, consumed: int) -> None:
    starts = accumulate((length for length, _ in parts), initial=0)
    batches = BatchSchedule(tuple(BatchStage(start, size) for start, (_, size) in zip(starts, parts, strict=False)))
    position, iterations = consumed, 0
    while position + batches.batch_size(position) <= samples:
        position += batches.batch_size(position)
        iterations += 1
    assert batches.iterations_within(samples, consumed) == iterations


@given(RAMPS, st.integers(1, 7), st.integers(0, 500))
def test_a_decreased_batch_is_the_largest_multiple_and_a_misfit_is_what_has_none(
    parts: tuple[int, int, int, int], grain: int, consumed: int
) -> None:
    wished, batches = ramp(*parts), replace(ramp(*parts), grain=grain, may_decrease=True)
    if batches.misfit(consumed) is None:
        assert batches.batch_size(consumed) == wished.batch_size(consumed) // grain * grain > 0
    strict = replace(ramp(*parts), grain=grain, may_decrease=False)
    met = {strict.batch_size(samples) for samples in walked_from(strict, consumed)}
    assert (strict.misfit(consumed) is None) == all(size % grain == 0 for size in met)


def walked_from(batches: BatchSchedule, consumed: int) -> list[int]:
    """Samples consumed before each batch up to one of the last size."""
    before = [consumed]
    while before[-1] < batches.stages[-1].start:
        before.append(before[-1] + batches.batch_size(before[-1]))
    return before


def test_the_ramp_of_megatrons_help_adds_increments_of_eight_over_its_samples() -> None:
    batches = batch_schedule(TrainingConfig(rampup_batch_size=("16", "8", "300000"), global_batch_size=1024), SampleLengths(2048))
    assert len(batches.stages) == 1 + (1024 - 16) // 8
    assert [batches.batch_size(samples) for samples in (0, 2380, 2381, 299999, 300000)] == [16, 16, 24, 1016, 1024]


def test_steps_begin_at_tokens_rounded_down_to_samples() -> None:
    batches = batch_schedule(TrainingConfig(step_batch_size_schedule="0:768 250B:1536,1.5T:2K", global_batch_size=1), SampleLengths(4096))
    thresholds = 250 * 10**9 // 4096, 15 * 10**11 // 4096
    assert batches.stages == (BatchStage(0, 768), BatchStage(thresholds[0], 1536), BatchStage(thresholds[1], 2000))
    assert [batches.batch_size(samples) for samples in (0, thresholds[0] - 1, thresholds[0])] == [768, 768, 1536]


def test_a_trillion_samples_are_counted_at_once() -> None:
    batches = BatchSchedule((BatchStage(0, 3), BatchStage(10**12, 7)))
    assert batches.samples_after(10**12) == 3 * (-(-(10**12) // 3)) + 7 * (10**12 - -(-(10**12) // 3))
    assert batches.iterations_within(10**15) > 10**14


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (TrainingConfig(rampup_batch_size=("16", "8")), "--rampup-batch-size 16 8 is not a ramp; give start, increment and samples"),
        (TrainingConfig(rampup_batch_size=("a", "8", "9")), "--rampup-batch-size a 8 9 is not a ramp"),
        (TrainingConfig(rampup_batch_size=("8", "0", "9")), "has a value below 1"),
        (
            TrainingConfig(rampup_batch_size=("64", "8", "9"), global_batch_size=32),
            "starts above --global-batch-size 32; choose",
        ),
        (TrainingConfig(rampup_batch_size=("8", "7", "9"), global_batch_size=32), "in steps of 7; choose an increment that divides 24"),
        (TrainingConfig(step_batch_size_schedule=""), "has no batch size for the start of the run"),
        (TrainingConfig(step_batch_size_schedule="5K:8"), "has no batch size for the start of the run"),
        (
            TrainingConfig(step_batch_size_schedule="0:8 5X:9"),
            "has the pair 5X:9; give pairs of tokens and batch size",
        ),
        (TrainingConfig(step_batch_size_schedule="0:8 InfinityK:9"), "has the pair InfinityK:9"),
        (TrainingConfig(step_batch_size_schedule="0:8 0.5:9"), "has the pair 0.5:9"),
        (TrainingConfig(step_batch_size_schedule="0:0"), "no size below 1"),
        (TrainingConfig(step_batch_size_schedule="0:8 17:16 20:32"), "has two sizes from sample 1 on; choose thresholds further apart"),
    ],
)
def test_an_unusable_schedule_is_named(training: TrainingConfig, message: str) -> None:
    with pytest.raises(FlagError, match=message):
        batch_schedule(training, SampleLengths(16))
