"""The size of every global batch of a run (constant, a ramp, or steps), and lengths in samples that follow from it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import NamedTuple

from megatron_zpp.config.flag import LARGEST_COUNT, LARGEST_TOKENS, FlagError
from megatron_zpp.config.sample_lengths import SampleLengths
from megatron_zpp.config.schema import Config, OptimizerConfig, TrainingConfig

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
LARGEST_STEPS = 2**16  # of a ramp; each is a stage of the schedule
RAMP_EXAMPLE = "give start, increment and samples, three whole numbers from 1 on, such as 16 8 300000"
STEPS_EXAMPLE = 'give pairs of tokens and batch size, such as "0:768 250B:1536"'


class BatchStage(NamedTuple):
    """start: the size holds once this many samples are consumed. asked_size: the global batch size that the flags ask for."""

    start: int
    asked_size: int


@dataclass(frozen=True)
class BatchSchedule:
    """The size of every global batch of a run.

    stages: ascending from sample 0. grain: samples of one micro-batch of all ranks; batches must be multiples of it.
    may_decrease: whether other sizes are rounded down to a multiple. A size that still does not fit is kept, because the run may never
    reach it; `misfit` finds it.
    """

    stages: tuple[BatchStage, ...]
    grain: int = 1
    may_decrease: bool = False

    @property
    def as_asked(self) -> BatchSchedule:
        """The same schedule with the sizes that the flags ask for, whether or not they fit the world."""
        return BatchSchedule(self.stages)

    def batch_size(self, consumed_samples: int) -> int:
        """Samples of the batch that begins after `consumed_samples`."""
        return self._size(self.stages[bisect_right(self.stages, consumed_samples, key=lambda stage: stage.start) - 1])

    @property
    def full_size(self) -> int:
        """Samples of the last batches."""
        return self._size(self.stages[-1])

    def misfit(self, consumed_samples: int) -> int | None:
        """The first size that the flags ask for after `consumed_samples` and that is not a multiple of the grain; None if all are."""
        runs = self._runs(consumed_samples)
        return next((stage.asked_size for stage, _ in runs if self._size(stage) % self.grain != 0), None)

    def samples_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Samples consumed after `iterations` further batches."""
        for stage, most in self._runs(consumed_samples):
            count = iterations if most is None else min(iterations, most)
            iterations -= count
            consumed_samples += count * self._size(stage)
        return consumed_samples

    def iterations_within(self, samples: int, consumed_samples: int = 0) -> int:
        """The number of further whole batches within the first `samples` samples of the run."""
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
        """The stages after `consumed_samples` and the number of batches that begin in each; None for the last stage, which has no end."""
        for stage, following in pairwise(self.stages):
            if consumed_samples < following.start:
                count = -((consumed_samples - following.start) // self._size(stage))
                consumed_samples += count * self._size(stage)
                yield stage, count
        yield self.stages[-1], None

    def _size(self, stage: BatchStage) -> int:
        rounded = stage.asked_size // self.grain * self.grain
        return rounded if self.may_decrease and rounded > 0 else stage.asked_size


def batch_schedule(training: TrainingConfig, lengths: SampleLengths) -> BatchSchedule:
    """The sizes that the flags of a resolved configuration ask for, in any world. Raises FlagError for an unusable flag."""
    return BatchSchedule(tuple(_stages(training, training.global_batch_size, lengths)))


def running_schedule(config: Config, sample_groups: int) -> BatchSchedule:
    """The sizes of a run's batches in a world of `sample_groups` groups of ranks with samples of their own.

    The configuration need not be resolved. Raises FlagError for an unusable flag.
    """
    training = config.training
    grain = (training.micro_batch_size or 1) * sample_groups
    stages = tuple(_stages(training, training.global_batch_size or grain, config.sample_lengths))
    return BatchSchedule(stages, grain, training.decrease_batch_size_if_needed)


def _stages(training: TrainingConfig, full_size: int, lengths: SampleLengths) -> Iterator[BatchStage]:
    if training.step_batch_size_schedule is not None:
        return read_steps(training.step_batch_size_schedule, lengths)
    if training.rampup_batch_size:
        return _ramp(read_ramp(training.rampup_batch_size), full_size)
    return iter([BatchStage(0, full_size)])


@dataclass(frozen=True)
class Horizons:
    """Lengths of the schedule of the learning rate, in samples from the start of training.

    warmup_samples: to the end of the warmup; as a fraction of the decay it may not be whole. decay_samples: to the end of the decay.
    annealing_samples: the length of WSD's annealing, which is the last part of the decay.
    tokens_per_sample: if the decay's length is given in tokens, all lengths count samples of this many tokens, also where samples had
    other lengths; None if they count samples of any length.
    """

    warmup_samples: float
    decay_samples: int
    annealing_samples: int
    tokens_per_sample: int | None = None


def horizons(optimizer: OptimizerConfig, training: TrainingConfig, lengths: SampleLengths) -> Horizons:
    """The horizons of a resolved configuration, the same in every world.

    Iterations are converted to samples by the batch sizes that the flags ask for; those of WSD's annealing by the last size.
    """
    batches, annealing = batch_schedule(training, lengths), _annealing_samples(optimizer, training)
    warmup_tokens, fraction = optimizer.lr_warmup_tokens, optimizer.lr_warmup_fraction
    warmup = lengths.samples_for(warmup_tokens) if warmup_tokens else optimizer.lr_warmup_samples
    warmup += batches.samples_after(optimizer.lr_warmup_iters)
    if optimizer.lr_decay_tokens is None:
        decay = _samples(optimizer.lr_decay_samples, optimizer.lr_decay_iters, batches)
        return Horizons(warmup if fraction is None else fraction * decay, decay, annealing)
    decay = lengths.present_samples(optimizer.lr_decay_tokens)
    warmup = lengths.present_samples(warmup_tokens or lengths.tokens_in(warmup))
    return Horizons(warmup if fraction is None else fraction * decay, decay, annealing, lengths.seq_length)


def length_in_samples(training: TrainingConfig, batches: BatchSchedule) -> int:
    """The length of training in samples."""
    return _samples(training.train_samples, training.train_iters, batches)


def _samples(samples: int | None, iterations: int | None, batches: BatchSchedule) -> int:
    if samples is not None:
        return samples
    if iterations is None:
        raise RuntimeError("the configuration has a length in neither samples nor iterations; it was not resolved")
    return batches.as_asked.samples_after(iterations)


def _annealing_samples(optimizer: OptimizerConfig, training: TrainingConfig) -> int:
    if optimizer.lr_decay_style != "WSD":
        return 0
    if optimizer.lr_wsd_decay_samples is not None:
        return optimizer.lr_wsd_decay_samples
    return (optimizer.lr_wsd_decay_iters or 0) * training.global_batch_size


class Ramp(NamedTuple):
    """The three numbers of --rampup-batch-size, in samples."""

    start_size: int
    increment: int
    samples: int


def read_ramp(words: Sequence[str]) -> Ramp:
    """The ramp. Raises FlagError unless the words are three positive whole numbers."""
    spelled = f"--rampup-batch-size {' '.join(words)}"
    try:
        ramp = Ramp(*(int(word) for word in words))
    except (TypeError, ValueError):
        raise FlagError(f"{spelled} is not a ramp; {RAMP_EXAMPLE}.") from None
    if min(ramp) < 1:
        raise FlagError(f"{spelled} has a value below 1; {RAMP_EXAMPLE}.")
    if max(ramp) > LARGEST_COUNT:
        raise FlagError(f"{spelled} has a value above {LARGEST_COUNT}; {RAMP_EXAMPLE}.")
    return ramp


def _ramp(ramp: Ramp, full_size: int) -> Iterator[BatchStage]:
    """Equal steps in size, spread evenly over the samples of the ramp, as in Megatron."""
    spelled = f"--rampup-batch-size {' '.join(map(str, ramp))}"
    if ramp.start_size > full_size:
        raise FlagError(f"{spelled} starts above --global-batch-size {full_size}; choose a start of {full_size} or less.")
    steps, remainder = divmod(full_size - ramp.start_size, ramp.increment)
    if remainder != 0:
        raise FlagError(
            f"{spelled} does not reach --global-batch-size {full_size} in steps of {ramp.increment}; "
            f"choose an increment that divides {full_size - ramp.start_size}."
        )
    if steps > LARGEST_STEPS:
        raise FlagError(f"{spelled} has {steps} steps to --global-batch-size {full_size}, more than {LARGEST_STEPS}; raise the increment.")
    for step in range(steps + 1):
        # The first whole sample at which step / steps of the ramp's samples are consumed.
        yield BatchStage(-(-step * ramp.samples // max(1, steps)), ramp.start_size + step * ramp.increment)


def read_steps(text: str, lengths: SampleLengths) -> Iterator[BatchStage]:
    """The stages of `tokens:size tokens:size ...`. A threshold is rounded down to whole samples. Raises FlagError for other texts."""
    spelled = f'--step-batch-size-schedule "{text}"'
    stages = sorted(_step(pair, spelled, lengths) for pair in text.replace(",", " ").split())
    if not stages or stages[0].start != 0:
        raise FlagError(f"{spelled} has no batch size for the start of the run; {STEPS_EXAMPLE}, the first from 0 tokens on.")
    for before, after in pairwise(stages):
        if before.start == after.start:
            raise FlagError(f"{spelled} has two sizes from sample {after.start} on; choose thresholds further apart.")
    yield from stages


def _step(pair: str, spelled: str, lengths: SampleLengths) -> BatchStage:
    threshold, _, size = pair.partition(":")
    try:
        stage = BatchStage(lengths.samples_within(_count_in(threshold)), _count_in(size))
    except (ArithmeticError, ValueError):
        raise FlagError(f"{spelled} has the pair {pair}; {STEPS_EXAMPLE}.") from None
    if stage.start < 0 or stage.asked_size < 1:
        raise FlagError(f"{spelled} has the pair {pair}; {STEPS_EXAMPLE}, with no threshold below 0 and no size below 1.")
    if stage.asked_size > LARGEST_COUNT:
        raise FlagError(f"{spelled} has the pair {pair}; {STEPS_EXAMPLE}, with no size above {LARGEST_COUNT}.")
    return stage


def _count_in(text: str) -> int:
    """The whole number in `250B`, `1.5M` or `768`. Raises ArithmeticError for other texts, and far above LARGEST_TOKENS."""
    factor = SUFFIXES.get(text[-1:].upper(), 1)
    number = Decimal(text[:-1] if factor > 1 else text) * factor
    if abs(number) > LARGEST_TOKENS or number != number.to_integral_value():
        raise ArithmeticError(text)
    return int(number)
