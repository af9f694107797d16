"""One real step of a module of one's own, as torch's profiler shows it (benchmarks/results/module_trace.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.drawing.canvas import Canvas, Theme
from docs.drawing.lanes import LANES, LEFT, ROW, WIDTH, colours, draw_step

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "module_trace.json"
TOP = 106
SHORT = 30  # units of width below which a name does not fit


def recorded() -> dict[str, Any]:
    """The step of rank 0 (benchmarks/step_trace.py:Step)."""
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))["step"]
    return found


def draw(theme: Theme) -> Canvas:
    step = recorded()
    scale = WIDTH / step["milliseconds"]
    canvas = Canvas(LEFT + WIDTH + 30, TOP + (1 + len(LANES)) * ROW + 30, theme, "One step of a vision transformer in torch's profiler")
    canvas.text(14, 24, "One step of one rank of four, in two nodes, as torch's profiler shows it", size=15, bold=True)
    canvas.legend(14, 40, colours(theme))
    for _, unit, start, end in step["computed"]:
        if (end - start) * scale > SHORT:
            canvas.text(LEFT + (start + end) / 2 * scale, TOP - 10, unit or "update", size=11, fill=theme.faint, anchor="middle")
    draw_step(canvas, TOP, "", step, scale)
    canvas.text(LEFT + WIDTH - 4, TOP + (1 + len(LANES)) * ROW + 14, f"{step['milliseconds']:.0f} ms", size=13, anchor="end", bold=True)
    return canvas
