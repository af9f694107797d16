"""Weight decay as a function of the samples trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from megatron_zpp.config.sample_lengths import SampleLengths
from megatron_zpp.config.schema import OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay that changes from `start` to `end` over the first `incr_samples` samples, and then stays at `end`.

    tokens_per_sample: see Horizons.
    """

    style: str
    start: float
    end: float
    incr_samples: int
    tokens_per_sample: int | None = None

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, training: TrainingConfig, lengths: SampleLengths) -> WeightDecaySchedule:
        """Schedule of a resolved configuration. It counts tokens if it ends with a training whose length is given in tokens."""
        samples, tokens_per_sample = optimizer.weight_decay_incr_samples, None
        if training.train_tokens is not None and samples == training.train_samples:
            samples, tokens_per_sample = lengths.present_samples(training.train_tokens), lengths.seq_length
        return cls(optimizer.weight_decay_incr_style, optimizer.start_weight_decay, optimizer.end_weight_decay, samples, tokens_per_sample)

    def weight_decay(self, num_samples: float) -> float:
        """Weight decay of the step that begins after `num_samples` samples."""
        if self.style == "constant" or num_samples > self.incr_samples:
            return self.end
        ratio = num_samples / self.incr_samples
        share = ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return self.start + share * (self.end - self.start)

    def differences(self, other: WeightDecaySchedule) -> Iterator[tuple[str, Any, Any]]:
        """Name and both values of every field that makes `other` another schedule. A constant decay has one value and no length."""
        if self.style == other.style == "constant":
            if self.end != other.end:
                yield "constant", self.end, other.end
            return
        for member in fields(self):
            ours, theirs = getattr(self, member.name), getattr(other, member.name)
            if ours != theirs and member.name != "tokens_per_sample":
                yield member.name, ours, theirs
