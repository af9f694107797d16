"""The learning rate as a function of the samples trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_zpp.config.schema import OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warmup, then a constant rate or a decay to `min_lr` that ends after `decay_samples`, warmup included.

    Counted in samples, so that the curve does not depend on the batch size; the counts may be fractions of a sample, as in Megatron.
    A skipped step does not advance the count that the caller keeps.
    """

    style: str
    max_lr: float
    min_lr: float
    warmup_init_lr: float
    warmup_samples: float
    decay_samples: float

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, training: TrainingConfig) -> LearningRateSchedule:
        """The schedule of a resolved configuration."""
        return cls.from_flags(vars(optimizer), training.global_batch_size)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any], samples_per_step: int) -> LearningRateSchedule:
        """The schedule of resolved optimizer flags by name. Raises KeyError where one is missing."""
        decay_samples = _samples(flags["lr_decay_samples"], flags["lr_decay_iters"], samples_per_step)
        if flags["lr_warmup_fraction"] is not None:
            warmup_samples = flags["lr_warmup_fraction"] * decay_samples
        else:
            warmup_samples = flags["lr_warmup_samples"] + flags["lr_warmup_iters"] * samples_per_step
        return cls(flags["lr_decay_style"], flags["lr"], flags["min_lr"], flags["lr_warmup_init"], warmup_samples, decay_samples)

    def differences(self, other: LearningRateSchedule) -> Iterator[tuple[str, Any, Any]]:
        """Name and both values of what makes the curve of `other` another one; a constant rate has no end of decay."""
        without_effect = set()
        if self.style == other.style == "constant":
            without_effect |= {"min_lr", "decay_samples"}
        if self.warmup_samples == other.warmup_samples == 0:
            without_effect.add("warmup_init_lr")
        for member in fields(self):
            ours, theirs = getattr(self, member.name), getattr(other, member.name)
            if ours != theirs and member.name not in without_effect:
                yield member.name, ours, theirs

    def __post_init__(self) -> None:
        if self.style not in ("constant", "linear", "cosine"):
            raise ValueError(f"--lr-decay-style {self.style} is not available; choose constant, linear or cosine.")

    def learning_rate(self, num_samples: int) -> float:
        """The rate of the step that begins after `num_samples` samples."""
        if self.warmup_samples > 0 and num_samples <= self.warmup_samples:
            return self.warmup_init_lr + (self.max_lr - self.warmup_init_lr) * num_samples / self.warmup_samples
        if self.style == "constant":
            return self.max_lr
        if num_samples > self.decay_samples:
            return self.min_lr
        return self.min_lr + self._remaining_share(num_samples) * (self.max_lr - self.min_lr)

    def _remaining_share(self, num_samples: int) -> float:
        """1 at the end of the warmup, 0 at the end of the decay."""
        ratio = (num_samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        return 1.0 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)


def _samples(samples: int | None, iterations: int | None, samples_per_step: int) -> int:
    if samples is not None:
        return samples
    if iterations is not None:
        return iterations * samples_per_step
    raise RuntimeError("the configuration has no horizon of learning-rate decay; it was not resolved")
