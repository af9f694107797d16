"""Loss by time of training, at three rates of the link between two nodes (benchmarks/results/time_to_loss.json)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.slow_links.configurations import ALL, FSDP2, LEAN, ZERO3
from benchmarks.time_study.analysis import Findings
from benchmarks.time_study.record import Record
from benchmarks.time_study.settings import SETTINGS
from docs.drawing.canvas import Canvas, Theme

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "time_to_loss.json"
SHOWN = (FSDP2, ZERO3, ALL, LEAN, f"{LEAN}, 4 x the batch", "islands, H = 16")
LEFT, TOP, WIDE, HIGH, GAP = 50, 92, 236, 210, 24
SECONDS_PER_MINUTE = 60
TICKS = {1: "1 min", 10: "10 min", 60: "1 h", 600: "10 h"}
STEP = 0.5  # between lines of loss
MOST = 3.25  # above it are the first steps of large batches alone


def draw(theme: Theme) -> Canvas:
    found = Findings(Record.stored(RESULT))
    rates = [rate for rate in reversed(found.rates) if rate.is_limited]
    shown = [name for name in SHOWN if SETTINGS[name] in found.timed]
    names = (theme.compute, theme.intra, theme.accent, theme.inter, theme.inter, theme.gradient)
    colours = dict(zip(SHOWN, names, strict=True))
    curves = [[[point for point in found.points(SETTINGS[name], rate) if point[1] < MOST] for name in shown] for rate in rates]
    canvas = Canvas(LEFT + len(rates) * (WIDE + GAP), TOP + HIGH + 44, theme, "Loss by time of training, at three rates of the link")
    millions = found.world.parameters / 1e6
    canvas.text(14, 24, f"Validation loss by time, {millions:.0f} million parameters on two nodes", size=15, bold=True)
    canvas.text(14, 42, "each way at its best learning rate; where a line ends, so does the run", size=12, fill=theme.faint)
    x = 14.0
    for name in shown:
        canvas.line([(x, 60), (x + 18, 60)], stroke=colours[name], width=2.4, dashes=_dashes(name))
        canvas.text(x + 24, 64, name, size=12, fill=theme.faint)
        x += 52 + 6.6 * len(name)
    axes = Axes([point for of_rate in curves for curve in of_rate for point in curve])
    for index, (rate, of_rate) in enumerate(zip(rates, curves, strict=True)):
        left = LEFT + index * (WIDE + GAP)
        _panel(canvas, axes, left, rate.in_words, with_losses=index == 0)
        for name, curve in zip(shown, of_rate, strict=True):
            line = [axes.place(left, *point) for point in curve]
            canvas.line(line, stroke=colours[name], width=2.2, dashes=_dashes(name))
    return canvas


class Axes:
    """Minutes to the right, on a logarithmic scale, and loss upwards. points: seconds and losses to show."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        minutes = [seconds / SECONDS_PER_MINUTE for seconds, _ in points]
        self.first, self.last = math.log(min(minutes)), math.log(max(minutes))
        self.low = STEP * math.floor(min(loss for _, loss in points) / STEP)
        self.high = STEP * math.ceil(max(loss for _, loss in points) / STEP)

    def place(self, left: float, seconds: float, loss: float) -> tuple[float, float]:
        x = left + WIDE * (math.log(seconds / SECONDS_PER_MINUTE) - self.first) / (self.last - self.first)
        return x, TOP + HIGH * (self.high - loss) / (self.high - self.low)

    @property
    def losses(self) -> list[float]:
        return [self.low + STEP * index for index in range(round((self.high - self.low) / STEP) + 1)]

    @property
    def minutes(self) -> list[int]:
        return [minutes for minutes in TICKS if self.first <= math.log(minutes) <= self.last]


def _panel(canvas: Canvas, axes: Axes, left: float, words: str, *, with_losses: bool) -> None:
    theme = canvas.theme
    canvas.text(left + WIDE / 2, TOP - 8, words, size=13, bold=True, anchor="middle")
    for loss in axes.losses:
        y = TOP + HIGH * (axes.high - loss) / (axes.high - axes.low)
        canvas.line([(left, y), (left + WIDE, y)], stroke=theme.line)
        if with_losses:
            canvas.text(left - 8, y + 4, f"{loss:.1f}", size=12, fill=theme.faint, anchor="end")
    for minutes in axes.minutes:
        x, y = axes.place(left, SECONDS_PER_MINUTE * minutes, axes.low)
        canvas.line([(x, TOP), (x, y)], stroke=theme.line)
        canvas.text(x, y + 18, TICKS[minutes], size=12, fill=theme.faint, anchor="middle")


def _dashes(name: str) -> str:
    return "5 4" if SETTINGS[name].batch > 1 else ""
