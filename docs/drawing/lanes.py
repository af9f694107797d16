"""One real step over a slow link: what a rank computes, and what crosses on each lane beside it (benchmarks/results/step_trace.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.drawing.canvas import Canvas, Theme
from testbed.rates import Rate

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "step_trace.json"
LANES = {
    "inter-climb": "weights between nodes",
    "intra-climb": "weights inside a node",
    "intra-descend": "gradients inside a node",
    "inter-descend": "gradients between nodes",
}
LEFT, TOP, ROW, HIGH, GAP, WIDTH = 178, 72, 20, 15, 44, 640


def recorded() -> dict[str, Any]:
    """The rate of the link, and the step of each member of the family (benchmarks/step_trace.py:Step)."""
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def draw(theme: Theme) -> Canvas:
    found = recorded()
    steps, rate = found["steps"], Rate.parse(found["rate"]).in_words
    group = (1 + len(LANES)) * ROW + GAP
    canvas = Canvas(LEFT + WIDTH + 30, TOP + len(steps) * group, theme, "One step of rank 0 over a slow link, by member of the family")
    canvas.text(14, 24, f"One step of one rank, recorded: two nodes with a link of {rate}", size=15, bold=True)
    canvas.legend(14, 40, colours(theme))
    scale = WIDTH / max(step["milliseconds"] for step in steps.values())
    for index, (name, step) in enumerate(steps.items()):
        draw_step(canvas, TOP + index * group, name, step, scale)
        x = LEFT + step["milliseconds"] * scale
        canvas.text(
            x - 4,
            TOP + index * group + (1 + len(LANES)) * ROW + 14,
            f"{step['milliseconds'] / 1000:.1f} s",
            size=13,
            anchor="end",
            bold=True,
        )
    return canvas


def colours(theme: Theme) -> dict[str, str]:
    """What each colour of a step stands for."""
    return {
        "forward": theme.accent,
        "backward": theme.slices[1],
        "update": theme.slices[2],
        "waits": theme.paper,
        "crosses between nodes": theme.inter,
        "inside a node": theme.intra,
        "encodes, decodes": theme.gradient,
    }


def draw_step(canvas: Canvas, y: float, name: str, step: dict[str, Any], scale: float) -> None:
    """One step of a rank (benchmarks/step_trace.py:Step): what it computes, and below it the lanes."""
    theme = canvas.theme
    canvas.text(14, y + 12, name, size=15, bold=True)
    canvas.text(LEFT - 10, y + 12, "computation", size=12, anchor="end")
    of_phase = {"forward": theme.accent, "backward": theme.slices[1], "optimizer": theme.slices[2]}
    for phase, _, start, end in step["computed"]:
        canvas.rect(LEFT + start * scale, y, max(0.5, (end - start) * scale), HIGH, fill=of_phase[phase], radius=1)
    for start, end in step["waits"]:
        canvas.rect(LEFT + start * scale, y + 2, max(0.0, (end - start) * scale), HIGH - 4, fill=theme.paper, radius=0)
    for row, (lane, words) in enumerate(LANES.items(), start=1):
        canvas.text(LEFT - 10, y + row * ROW + 12, words, size=12, fill=theme.faint, anchor="end")
        canvas.line([(LEFT, y + row * ROW + HIGH + 2), (LEFT + step["milliseconds"] * scale, y + row * ROW + HIGH + 2)], stroke=theme.line)
        for hop in step["lanes"].get(lane, []):
            _hop(canvas, y + row * ROW, lane, hop, scale)
    x = LEFT + step["milliseconds"] * scale
    canvas.line([(x, y - 4), (x, y + (1 + len(LANES)) * ROW)], stroke=theme.ink)


def _hop(canvas: Canvas, y: float, lane: str, hop: list[Any], scale: float) -> None:
    theme = canvas.theme
    _, start, encoded, sent, arrived, end = hop
    colour = theme.inter if lane.startswith("inter") else theme.intra
    canvas.rect(LEFT + sent * scale, y + 2, max(0.7, (arrived - sent) * scale - 0.6), HIGH - 3, fill=colour, radius=1)
    for first, last in ((start, encoded), (arrived, end)):
        canvas.rect(LEFT + first * scale, y + 2, max(0.4, (last - first) * scale), HIGH - 3, fill=theme.gradient, radius=0)
