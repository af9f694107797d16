"""The tables of the found."""

from __future__ import annotations

import math

from benchmarks.report import in_table
from benchmarks.slow_links.configurations import LEAN
from benchmarks.time_study.analysis import Findings, loss_at, seconds_with, step_with
from benchmarks.time_study.settings import SETTINGS
from testbed.rates import Rate


def loss_by_tokens(found: Findings) -> str:
    """Loss after equal tokens: a quarter, half and all of those of the shortest runs, and as many again."""
    lean = SETTINGS[LEAN]
    tokens = [found.tokens(lean, found.record.best_curve(LEAN).steps[-1]) * share for share in (0.25, 0.5, 1, 2)]
    rows = []
    for setting in found.settings:
        curve = found.record.best_curve(setting.name)
        losses = [loss_at(curve, count / found.tokens(setting, 1)) for count in tokens]
        rows.append([setting.name, f"{curve.learning_rate:g}", *("-" if loss is None else f"{loss:.3f}" for loss in losses)])
    return in_table(["", "learning rate", *(f"{count / 1e6:.2f}M tokens" for count in tokens)], rows)


def minutes_to_loss(found: Findings) -> str:
    """Minutes and tokens until each setting has the lowest loss that all of the shortest runs have, by the rate of the link."""
    rows = []
    for setting in found.timed:
        step = step_with(found.record.best_curve(setting.name), found.target)
        if step is None:
            rows.append([setting.name, *["-"] * (len(found.rates) + 1)])
            continue
        minutes = [f"{found.seconds(setting, rate, step) / 60:.1f}" for rate in found.rates]
        rows.append([setting.name, f"{found.tokens(setting, step) / 1e6:.2f}M", *minutes])
    return in_table([f"to a loss of {found.target:.3f}", "tokens", *(rate.in_words for rate in found.rates)], rows)


def step_seconds(found: Findings) -> str:
    """Seconds of a step, by the rate of the link."""
    of_rates = [found.record.step_seconds[str(rate)] for rate in found.rates]
    names = dict.fromkeys(name for seconds in of_rates for name in seconds)
    rows = [[name, *(f"{seconds[name]:.2f}" if name in seconds else "-" for seconds in of_rates)] for name in names]
    return in_table(["seconds of a step", *(rate.in_words for rate in found.rates)], rows)


def whole_runs(found: Findings) -> str:
    """Whole runs over a limited link, beside what steps and their time give, and when they had the lowest loss that all of them have."""
    runs, rows = list(found.whole_runs()), []
    target = max((min(curve.losses) for curve, _ in runs), default=math.nan)
    for curve, composed in runs:
        seconds = [curve.seconds[-1], composed, seconds_with(curve, target)]
        minutes = ["-" if one is None else f"{one / 60:.1f}" for one in seconds]
        rows.append([curve.setting, Rate.parse(curve.rate).in_words, str(curve.steps[-1]), *minutes, f"{curve.losses[-1]:.3f}"])
    header = ["whole run", "link", "steps", "minutes", "steps x seconds of a step, minutes", f"minutes to a loss of {target:.3f}", "loss"]
    return in_table(header, rows, words=2)


TABLES = (loss_by_tokens, minutes_to_loss, step_seconds, whole_runs)
