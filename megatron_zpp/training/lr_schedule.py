"""The learning rate as a function of the samples trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_zpp.config.batch_schedule import horizons
from megatron_zpp.config.flag import check_value
from megatron_zpp.config.groups.optimizer import LR_STYLES
from megatron_zpp.config.sample_lengths import SampleLengths
from megatron_zpp.config.schema import OptimizerConfig, TrainingConfig

# The rate of a decay as a fraction: 1 is the peak, 0 the lowest rate. The argument is the fraction of the decay that is over.
REMAINING: Mapping[str, Callable[[float], float]] = {
    "linear": lambda over: 1.0 - over,
    "cosine": lambda over: 0.5 * (math.cos(math.pi * over) + 1.0),
    "exponential": lambda over: 2.0 * math.pow(0.5, over) - 1.0,
    "minus_sqrt": lambda over: 1.0 - math.sqrt(over),
}


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warmup, then a constant rate or a decay to `min_lr` that ends after `decay_samples`, warmup included.

    WSD keeps the peak until `annealing_samples` before that end, and then falls by `annealing_style`. All counts are in samples, so
    that the curve does not depend on the batch size; they may be fractions of a sample, as in Megatron. The caller does not
    count the samples of skipped steps. tokens_per_sample: see Horizons.
    """

    style: str
    max_lr: float
    min_lr: float
    warmup_init_lr: float
    warmup_samples: float
    decay_samples: float
    annealing_style: str = "exponential"
    annealing_samples: float = 0.0
    tokens_per_sample: int | None = None

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, training: TrainingConfig, lengths: SampleLengths) -> LearningRateSchedule:
        """Schedule of a resolved configuration."""
        ends = horizons(optimizer, training, lengths)
        return cls(
            style=optimizer.lr_decay_style,
            max_lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            warmup_init_lr=optimizer.lr_warmup_init,
            warmup_samples=ends.warmup_samples,
            decay_samples=ends.decay_samples,
            annealing_style=optimizer.lr_wsd_decay_style,
            annealing_samples=ends.annealing_samples,
            tokens_per_sample=ends.tokens_per_sample,
        )

    def differences(self, other: LearningRateSchedule) -> Iterator[tuple[str, Any, Any]]:
        """Name and both values of every field in which the two curves differ. Ignores fields that change neither curve."""
        without_effect = {"tokens_per_sample"}
        if self.style == other.style == "constant":
            without_effect |= {"min_lr", "decay_samples"}
        if self.style != "WSD" or other.style != "WSD":
            without_effect |= {"annealing_style", "annealing_samples"}
        if self.warmup_samples == other.warmup_samples == 0:
            without_effect.add("warmup_init_lr")
        for member in fields(self):
            ours, theirs = getattr(self, member.name), getattr(other, member.name)
            if ours != theirs and member.name not in without_effect:
                yield member.name, ours, theirs

    def __post_init__(self) -> None:
        check_value("--lr-decay-style", self.style, LR_STYLES)

    def learning_rate(self, num_samples: float) -> float:
        """Learning rate of the step that begins after `num_samples` samples."""
        if self.warmup_samples > 0 and num_samples <= self.warmup_samples:
            return self.warmup_init_lr + (self.max_lr - self.warmup_init_lr) * num_samples / self.warmup_samples
        if self.style == "constant":
            return self.max_lr
        if num_samples > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup_samples, 1)) / math.sqrt(max(num_samples, 1)))
        return self.min_lr + self._remaining_share(num_samples) * (self.max_lr - self.min_lr)

    def _remaining_share(self, num_samples: float) -> float:
        """1 at the beginning of the decay, 0 at its end."""
        if self.style != "WSD":
            over = (num_samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
            return REMAINING[self.style](over)
        annealed = num_samples - (self.decay_samples - self.annealing_samples)
        return 1.0 if annealed <= 0 else REMAINING[self.annealing_style](annealed / self.annealing_samples)
