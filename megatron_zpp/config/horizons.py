"""How long learning rate and weight decay change, in samples, whatever the flags count in."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.batch_schedule import BatchSchedule, batch_schedule
from megatron_zpp.config.schema import OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class Horizons:
    """Samples from the start of training: to the end of the warmup, and to the end of the decay. annealing_samples: the last of these.

    A fraction of the decay need not be a whole number of samples.
    """

    warmup_samples: float
    decay_samples: int
    annealing_samples: int


def horizons(optimizer: OptimizerConfig, training: TrainingConfig, seq_length: int) -> Horizons:
    """The horizons of a resolved configuration; iterations count as many samples as their batches are wished to have."""
    batches = batch_schedule(training, seq_length)
    decay = _samples(optimizer.lr_decay_samples, optimizer.lr_decay_iters, batches)
    if optimizer.lr_warmup_fraction is not None:
        warmup: float = optimizer.lr_warmup_fraction * decay
    else:
        warmup = optimizer.lr_warmup_samples + batches.samples_after(optimizer.lr_warmup_iters)
    return Horizons(warmup, decay, _annealing_samples(optimizer, training))


def length_in_samples(training: TrainingConfig, seq_length: int) -> int:
    """Samples from the start of training to its end."""
    return _samples(training.train_samples, training.train_iters, batch_schedule(training, seq_length))


def _samples(samples: int | None, iterations: int | None, batches: BatchSchedule) -> int:
    if samples is not None:
        return samples
    if iterations is None:
        raise RuntimeError("the configuration has a horizon in neither samples nor iterations; it was not resolved")
    return batches.samples_after(iterations)


def _annealing_samples(optimizer: OptimizerConfig, training: TrainingConfig) -> int:
    if optimizer.lr_decay_style != "WSD":
        return 0
    if optimizer.lr_wsd_decay_samples is not None:
        return optimizer.lr_wsd_decay_samples
    return (optimizer.lr_wsd_decay_iters or 0) * training.global_batch_size
