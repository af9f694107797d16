"""Puts losses after steps and seconds of steps together: how long a setting takes at each rate of the link until it has a loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.slow_links.configurations import Workload
from benchmarks.time_study.record import Curve, Record
from benchmarks.time_study.settings import MEANS, SETTINGS, WARMUP_STEPS, Setting
from testbed.rates import Rate


@dataclass(frozen=True)
class Findings:
    """The results of a record, for every setting at the learning rate that ends lowest."""

    record: Record

    @property
    def settings(self) -> list[Setting]:
        """Those with a curve, in the order of SETTINGS."""
        found = {curve.setting for curve in self.record.curves}
        return [setting for name, setting in SETTINGS.items() if name in found]

    @property
    def timed(self) -> list[Setting]:
        """Those of `settings` whose steps have been timed at every rate, with the means of islands."""
        of_rates = [self.record.step_seconds[str(rate)] for rate in self.rates]
        common = set(SETTINGS).intersection(*of_rates) if of_rates else set[str]()
        has_means = all(MEANS in seconds for seconds in of_rates)
        return [setting for setting in self.settings if setting.name in common and (has_means or not setting.has_islands)]

    @property
    def rates(self) -> list[Rate]:
        """Rates at which steps were timed, the fastest first."""
        return sorted(map(Rate.parse, self.record.step_seconds), reverse=True)

    @property
    def world(self) -> Workload:
        subject = self.record.subject
        return Workload(subject["nodes"], subject["ranks_per_node"], subject["model"], subject["samples_per_rank"])

    def tokens(self, setting: Setting, step: float) -> float:
        return step * setting.batch * self.world.tokens_per_step

    @property
    def target(self) -> float:
        """The lowest loss that all of the shortest runs have: those of ways that send in every step, with the smallest batch."""
        shortest = min(setting.length for setting in self.settings)
        return max(min(self.record.best_curve(setting.name).losses) for setting in self.settings if setting.length == shortest)

    def seconds(self, setting: Setting, rate: Rate, step: float) -> float:
        """Seconds of training until a step is done. Islands begin with means."""
        own = self.record.step_seconds[str(rate)]
        first = min(step, WARMUP_STEPS) if setting.has_islands else 0.0
        of_first = first * own[MEANS] if first else 0.0
        return of_first + (step - first) * own[setting.name]

    def points(self, setting: Setting, rate: Rate) -> list[tuple[float, float]]:
        """Seconds and loss of each evaluation after the first step."""
        curve = self.record.best_curve(setting.name)
        return [(self.seconds(setting, rate, step), loss) for step, loss in zip(curve.steps[1:], curve.losses[1:], strict=True)]

    def whole_runs(self) -> Iterator[tuple[Curve, float]]:
        """Runs over a limited link, and the seconds that steps and their time give for them."""
        for curve in self.record.curves:
            rate = Rate.parse(curve.rate)
            if rate.is_limited and SETTINGS[curve.setting] in self.timed:
                yield curve, self.seconds(SETTINGS[curve.setting], rate, curve.steps[-1])


def loss_at(curve: Curve, step: float) -> float | None:
    """The loss after a step at which it was evaluated; None at another."""
    return next((loss for at, loss in zip(curve.steps, curve.losses, strict=True) if at == step), None)


def step_with(curve: Curve, loss: float) -> float | None:
    """The step after which a run has a loss for the first time, on straight lines between evaluations; None if it never has."""
    return _first_with(loss, curve.losses, curve.steps)


def seconds_with(curve: Curve, loss: float) -> float | None:
    """The seconds of training after which a run has a loss for the first time, as it took them."""
    return _first_with(loss, curve.losses, curve.seconds)


def _first_with(loss: float, losses: Sequence[float], places: Sequence[float]) -> float | None:
    for (before, higher), (place, lower) in pairwise(zip(places, losses, strict=True)):
        if lower <= loss:
            return place - (place - before) * (loss - lower) / (higher - lower)
    return None
