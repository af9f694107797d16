"""How far settings are from plain training, over the seeds that both have."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.loss_study.settings import SETTINGS, Setting, plain_of
from benchmarks.loss_study.training import Outcome

# Student's t, two-sided 95 %, by degrees of freedom from 1 on; beyond the table its last value is used, which is larger than the true one.
T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
)


@dataclass(frozen=True)
class Interval:
    """A mean, and half the length of its 95 % interval: NaN if there is one value."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """The interval of values that are independent and nearly normal. Raises ValueError if there are none."""
        if not values:
            raise ValueError("an interval needs at least one value")
        freedom = len(values) - 1
        if freedom == 0:
            return cls(values[0], math.nan)
        return cls(statistics.mean(values), T_95[min(freedom, len(T_95)) - 1] * statistics.stdev(values) / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.mean:+.2f}" if math.isnan(self.half) else f"{self.mean:+.2f} ± {self.half:.2f}"


@dataclass(frozen=True)
class Gap:
    """A setting compared with plain training at the same rate, seed by seed.

    percents: of the loss of plain training. exported: the same for the main weights. inter_node_bytes: per step. share: of the bytes of
    plain training.
    """

    setting: Setting
    percents: tuple[float, ...]
    exported: tuple[float, ...]
    mean_loss: float
    inter_node_bytes: float
    share: float

    @classmethod
    def between(cls, setting: Setting, pairs: Sequence[tuple[Outcome, Outcome]]) -> Gap:
        """pairs: (outcome of plain training, outcome of the setting) of every seed."""
        plain, own = pairs[0]
        return cls(
            setting,
            tuple(100 * (other.validation_loss / plain.validation_loss - 1) for plain, other in pairs),
            tuple(100 * (other.exported_loss / plain.exported_loss - 1) for plain, other in pairs),
            statistics.mean(other.validation_loss for _, other in pairs),
            own.inter_node_bytes,
            own.inter_node_bytes / plain.inter_node_bytes,
        )


def gaps_of(outcomes: Sequence[Outcome]) -> Iterator[Gap]:
    """The gap of every setting that shares a seed with plain training, in the order of the settings; those of plain training are 0."""
    by_place = {(outcome.setting, outcome.seed): outcome for outcome in outcomes}
    seeds = sorted({outcome.seed for outcome in outcomes})
    for setting in SETTINGS.values():
        plain = plain_of(setting).name
        pairs = [
            (by_place[plain, seed], by_place[setting.name, seed])
            for seed in seeds
            if {(plain, seed), (setting.name, seed)} <= by_place.keys()
        ]
        if pairs:
            yield Gap.between(setting, pairs)
