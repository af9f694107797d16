"""How many samples a global batch has, as a function of the samples consumed before it: constant, a ramp, or steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from typing import NamedTuple

from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.schema import Config, TrainingConfig

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
RAMP_EXAMPLE = "needed are three whole numbers from 1 on, such as 16 8 300000: start, increment, samples"
STEPS_EXAMPLE = 'needed are pairs of tokens and batch size, such as "0:768 250B:1536"'


class BatchStage(NamedTuple):
    """start: consumed samples from which on the size holds. wished_size: samples of a global batch, as the flags say it."""

    start: int
    wished_size: int


@dataclass(frozen=True)
class BatchSchedule:
    """The size of every global batch of a run.

    stages: ascending from sample 0. grain: samples of one micro-batch of every rank, which a batch is a multiple of.
    may_decrease: whether a size that is no multiple is rounded down to one. A wished size that fits neither way is kept, so that lengths
    can be computed before it is known whether the run still meets it; `misfit` finds it.
    """

    stages: tuple[BatchStage, ...]
    grain: int = 1
    may_decrease: bool = False

    def in_world(self, grain: int, *, may_decrease: bool) -> BatchSchedule:
        """The same schedule where a batch has to be a multiple of `grain`."""
        return replace(self, grain=grain, may_decrease=may_decrease)

    def batch_size(self, consumed_samples: int) -> int:
        """Samples of the batch that begins after `consumed_samples`."""
        return self._size(self.stages[bisect_right(self.stages, consumed_samples, key=lambda stage: stage.start) - 1])

    @property
    def full_size(self) -> int:
        """Samples of the last batches."""
        return self._size(self.stages[-1])

    def misfit(self, consumed_samples: int) -> int | None:
        """The first wished size from there on that a batch would have and cannot; None where there is none."""
        runs = self._runs(consumed_samples)
        return next((stage.wished_size for stage, _ in runs if self._size(stage) % self.grain != 0), None)

    def samples_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Samples consumed when that many further batches have been."""
        for stage, most in self._runs(consumed_samples):
            count = iterations if most is None else min(iterations, most)
            iterations -= count
            consumed_samples += count * self._size(stage)
        return consumed_samples

    def iterations_within(self, samples: int, consumed_samples: int = 0) -> int:
        """How many further whole batches there are until `samples` are consumed."""
        iterations = 0
        for stage, most in self._runs(consumed_samples):
            fitting = max(0, samples - consumed_samples) // self._size(stage)
            count = fitting if most is None else min(fitting, most)
            iterations += count
            consumed_samples += count * self._size(stage)
            if most is None or fitting < most:
                break
        return iterations

    def _runs(self, consumed_samples: int) -> Iterator[tuple[BatchStage, int | None]]:
        """The stages that batches begin in from there on, and how many do; None for the last one, which has no end."""
        for stage, following in pairwise(self.stages):
            if consumed_samples < following.start:
                count = -((consumed_samples - following.start) // self._size(stage))
                consumed_samples += count * self._size(stage)
                yield stage, count
        yield self.stages[-1], None

    def _size(self, stage: BatchStage) -> int:
        rounded = stage.wished_size // self.grain * self.grain
        return rounded if self.may_decrease and rounded > 0 else stage.wished_size


def batch_schedule(training: TrainingConfig, seq_length: int) -> BatchSchedule:
    """The wished sizes of a resolved configuration, which do not depend on the world. Raises FlagError for an unusable flag."""
    if training.step_batch_size_schedule is not None:
        return BatchSchedule(tuple(read_steps(training.step_batch_size_schedule, seq_length)))
    if training.rampup_batch_size:
        return BatchSchedule(tuple(_ramp(read_ramp(training.rampup_batch_size), training.global_batch_size)))
    return BatchSchedule((BatchStage(0, training.global_batch_size),))


def running_schedule(config: Config, world_size: int) -> BatchSchedule:
    """The sizes of a resolved configuration's batches in a world of `world_size` ranks."""
    training = config.training
    grain = training.micro_batch_size * world_size
    return batch_schedule(training, config.model.seq_length).in_world(grain, may_decrease=training.decrease_batch_size_if_needed)


class Ramp(NamedTuple):
    """What --rampup-batch-size says, in samples."""

    start_size: int
    increment: int
    samples: int


def read_ramp(words: Sequence[str]) -> Ramp:
    """Raises FlagError for anything else than three positive whole numbers."""
    spelled = f"--rampup-batch-size {' '.join(words)}"
    try:
        ramp = Ramp(*(int(word) for word in words))
    except (TypeError, ValueError):
        raise FlagError(f"{spelled} is no ramp; {RAMP_EXAMPLE}.") from None
    if min(ramp) < 1:
        raise FlagError(f"{spelled} has a value below 1; {RAMP_EXAMPLE}.")
    return ramp


def _ramp(ramp: Ramp, full_size: int) -> Iterator[BatchStage]:
    """Equal steps in size, spread evenly over the samples of the ramp, as Megatron has them."""
    spelled = f"--rampup-batch-size {' '.join(map(str, ramp))}"
    if ramp.start_size > full_size:
        raise FlagError(f"{spelled} starts above --global-batch-size {full_size}; choose a start of {full_size} or less.")
    steps, remainder = divmod(full_size - ramp.start_size, ramp.increment)
    if remainder != 0:
        raise FlagError(
            f"{spelled} does not reach --global-batch-size {full_size} in steps of {ramp.increment}; "
            f"choose an increment that divides {full_size - ramp.start_size}."
        )
    for step in range(steps + 1):
        # The first whole sample at which step / steps of the ramp's samples are consumed.
        yield BatchStage(-(-step * ramp.samples // max(1, steps)), ramp.start_size + step * ramp.increment)


def read_steps(text: str, seq_length: int) -> Iterator[BatchStage]:
    """The stages of `tokens:size tokens:size ...`; a threshold is rounded down to whole samples. Raises FlagError for anything else."""
    spelled = f'--step-batch-size-schedule "{text}"'
    stages = sorted(_step(pair, spelled, seq_length) for pair in text.replace(",", " ").split())
    if not stages or stages[0].start != 0:
        raise FlagError(f"{spelled} does not say with what the run begins; {STEPS_EXAMPLE}, the first from 0 tokens on.")
    for before, after in pairwise(stages):
        if before.start == after.start:
            raise FlagError(f"{spelled} has two sizes from sample {after.start} on; choose thresholds further apart.")
    yield from stages


def _step(pair: str, spelled: str, seq_length: int) -> BatchStage:
    threshold, _, size = pair.partition(":")
    try:
        stage = BatchStage(_count_in(threshold) // seq_length, _count_in(size))
    except (ArithmeticError, ValueError):
        raise FlagError(f"{spelled} has the pair {pair}; {STEPS_EXAMPLE}.") from None
    if stage.start < 0 or stage.wished_size < 1:
        raise FlagError(f"{spelled} has the pair {pair}; {STEPS_EXAMPLE}, no threshold below 0 and no size below 1.")
    return stage


def _count_in(text: str) -> int:
    """The whole number in `250B`, `1.5M` or `768`. Raises ValueError or ArithmeticError where there is none."""
    factor = SUFFIXES.get(text[-1:].upper(), 1)
    number = Decimal(text[:-1] if factor > 1 else text) * factor
    if number != number.to_integral_value():
        raise ValueError(text)
    return int(number)
