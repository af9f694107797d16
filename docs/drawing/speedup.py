"""Time of a step by the rate of the link between nodes, beside FSDP2 (benchmarks/results/two_nodes_2x2.json)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.drawing.canvas import Canvas, Theme
from testbed.rates import Rate

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "two_nodes_2x2.json"
RUNS = {"FSDP2": "PyTorch FSDP2", "ZeRO-3": "ZeRO-3", "ZeRO++": "ZeRO++", "lean": "lean"}
LEFT, TOP, BAR, GAP, WIDTH = 110, 76, 17, 20, 560


def gains() -> dict[str, dict[str, float]]:
    """FSDP2's time of a step over that of each run, by rate of the link: the median over rounds, in which all ran side by side."""
    rates = json.loads(RESULT.read_text(encoding="utf-8"))["rates"]
    return {rate: {run: _gain(run, rounds) for run in RUNS} for rate, rounds in rates.items()}


def _gain(run: str, rounds: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(measured["FSDP2"]["seconds"] / measured[run]["seconds"] for measured in rounds)


def draw(theme: Theme) -> Canvas:
    found = gains()
    group = len(RUNS) * BAR + GAP
    canvas = Canvas(
        LEFT + WIDTH + 70, TOP + len(found) * group + 8, theme, "Speed over slow links: steps per second, as multiples of FSDP2's"
    )
    canvas.text(14, 24, "Speed of a step by the rate of the link between two nodes (FSDP2 = 1)", size=15, bold=True)
    best = max(gain for by_run in found.values() for gain in by_run.values())
    colours = dict(zip(RUNS, (theme.compute, theme.intra, theme.accent, theme.inter), strict=True))
    canvas.legend(LEFT, 42, {RUNS[run]: colour for run, colour in colours.items()})
    canvas.text(LEFT + WIDTH, 52, "CPU ranks, two per node", size=12, fill=theme.faint, anchor="end")
    for index, (rate, by_run) in enumerate(found.items()):
        y = TOP + index * group
        canvas.text(LEFT - 12, y + 2 * BAR + 4, Rate.parse(rate).in_words, size=13, anchor="end")
        for place, run in enumerate(RUNS):
            gain = by_run[run]
            canvas.rect(LEFT, y + place * BAR, max(1.0, WIDTH * gain / best), BAR - 3, fill=colours[run])
            canvas.text(LEFT + WIDTH * gain / best + 7, y + place * BAR + 11.5, f"{gain:.1f}x", size=11.5, bold=run == "lean")
    canvas.line([(LEFT, TOP - 8), (LEFT, TOP + len(found) * group - GAP + 4)], stroke=theme.line)
    return canvas
