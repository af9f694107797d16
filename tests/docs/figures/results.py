"""Reads benchmarks/results, and computes from them what the pages say."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any

from harness.places import ROOT
from loss_study.gaps import Gap, Interval, gaps_of
from loss_study.settings import plain_of
from loss_study.training import Outcome
from slow_links.analysis import Rated, analyse
from slow_links.configurations import Workload
from slow_links.record import Record

FOLDER = ROOT / "benchmarks" / "results"


@cache
def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def only(name: str, **wanted: object) -> dict[str, Any]:
    """The one result of a file that has these values."""
    (found,) = [one for one in results(name)["results"] if all(one[key] == value for key, value in wanted.items())]
    return dict(found)


def spread(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def rounded_up(value: float, digits: int = 0) -> float:
    """For sentences with "within": the least number of so many digits that is not below the value."""
    return math.ceil(value * 10**digits - 1e-9) / 10**digits


# ---- Slow links


@cache
def rates(world: str) -> dict[str, Rated]:
    """By rate. world: such as 2x2 or 2x2_k8."""
    record = Record(FOLDER / f"two_nodes_{world}.json", {}, starts_anew=False)
    return {str(rated.rate): rated for rated in analyse(record, workload(world))}


@cache
def workload(world: str) -> Workload:
    subject = results(f"two_nodes_{world}")["subject"]
    ranks = (subject["nodes"], subject["ranks_per_node"], subject["model"], subject["micro_batch_size"])
    return Workload(*ranks, subject["gradient_accumulation"], subject["flags"])


def slower(name: str, other: str, rate: str = "unlimited") -> list[float]:
    """By how many percent a step of `name` is longer than one of `other`, in each round."""
    rounds = results("two_nodes_2x2")["rates"][rate]
    return [100 * (measured[name]["seconds"] / measured[other]["seconds"] - 1) for measured in rounds]


def over(name: str, other: str, rate: str, world: str = "2x2") -> float:
    """How many times as fast `name` is, the median over rounds."""
    rounds = results(f"two_nodes_{world}")["rates"][rate]
    return statistics.median(measured[other]["seconds"] / measured[name]["seconds"] for measured in rounds)


def in_three_digits(value: float | None) -> str:
    """As speedups are printed; 1 where no link is limited."""
    return "1" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


# ---- Loss

NARROW, WIDE = "loss_parity", "loss_parity_wide"


@cache
def outcomes(study: str = NARROW) -> tuple[Outcome, ...]:
    return tuple(Outcome(**one) for one in results(study)["outcomes"])


@cache
def gaps(study: str = NARROW) -> dict[str, Gap]:
    return {gap.setting.name: gap for gap in gaps_of(outcomes(study))}


def above(name: str, sign: int = 1, study: str = NARROW) -> tuple[float, float]:
    """Mean and half the interval of the gap to plain training, in percent; sign -1 for "below"."""
    interval = Interval.of(gaps(study)[name].percents)
    return sign * interval.mean, interval.half


def seed_by_seed(name: str, other: str, sign: int = 1) -> tuple[float, float]:
    """The difference of two gaps, over the seeds that both have with their plain run."""
    losses = {(one.setting, one.seed): one.validation_loss for one in outcomes()}
    plain = {each: plain_of(gaps()[each].setting).name for each in (name, other)}
    seeds = [
        seed for setting, seed in losses if setting == name and {(other, seed), *((plain[each], seed) for each in plain)} <= losses.keys()
    ]
    gap = {each: [100 * (losses[each, seed] / losses[plain[each], seed] - 1) for seed in seeds] for each in plain}
    interval = Interval.of([own - others for own, others in zip(gap[name], gap[other], strict=True)])
    return sign * interval.mean, interval.half
