"""What comes out of the quickstart: the loss of its run, and three ways compared (benchmarks/results/quickstart.json)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from docs.drawing.canvas import Canvas, Theme

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "quickstart.json"
TOP, HIGH, LEFT, WIDTH = 62, 176, 50, 380
BARS, BAR, ROW = 500, 24, 62  # left edge, height and distance of the bars
MOST_WIDTH = 210
TICKS = 3


def recorded() -> dict[str, Any]:
    """Curves, bytes and seconds of one quickstart (benchmarks/quickstart.py:figures_of)."""
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def curve(points: Mapping[str, float]) -> list[tuple[int, float]]:
    """Iterations and losses; the keys of a JSON object are texts."""
    return [(int(iteration), loss) for iteration, loss in points.items()]


def draw(theme: Theme) -> Canvas:
    found = recorded()
    canvas = Canvas(
        840, TOP + HIGH + 48, theme, "What comes out of the quickstart: loss of its run, and bytes and losses of three ways compared"
    )
    _losses(canvas, found)
    _bars(canvas, found["compared"])
    return canvas


def _losses(canvas: Canvas, found: Mapping[str, Any]) -> None:
    theme, run = canvas.theme, found["run"]
    losses, validations, frequencies = curve(run["losses"]), curve(run["validation_losses"]), found["token_frequencies_loss"]
    values = [loss for _, loss in [*losses, *validations]] + [frequencies]
    low, high, last = int(min(values)), int(max(values)) + 1, max(iteration for iteration, _ in losses)

    def place(iteration: float, loss: float) -> tuple[float, float]:
        return LEFT + WIDTH * iteration / last, TOP + HIGH * (high - loss) / (high - low)

    canvas.text(14, 24, "Loss of the run with ZeRO++, in nats per token", size=15, bold=True)
    canvas.text(
        14,
        42,
        f"In the end {found['gain_nats']:.2f} below token frequencies alone; all of it took {found['seconds']} s",
        size=12,
        fill=theme.faint,
    )
    for loss in range(low, high + 1):
        y = place(0, loss)[1]
        canvas.line([(LEFT, y), (LEFT + WIDTH, y)], stroke=theme.line)
        canvas.text(LEFT - 8, y + 4, str(loss), size=12, fill=theme.faint, anchor="end")
    for tick in range(TICKS + 1):
        x, _ = place(last * tick / TICKS, low)
        canvas.text(x, TOP + HIGH + 18, f"{last * tick / TICKS:.0f}", size=12, fill=theme.faint, anchor="middle")
    canvas.text(LEFT + WIDTH / 2, TOP + HIGH + 36, "iteration", size=12, fill=theme.faint, anchor="middle")
    _frequencies(canvas, place, last, frequencies)
    canvas.line([place(*point) for point in losses], stroke=theme.accent, width=2.2)
    for point in validations:
        x, y = place(*point)
        canvas.rect(x - 4, y - 4, 8, 8, fill=theme.ink, radius=4)
    canvas.text(place(*losses[1])[0] + 16, place(*losses[1])[1] - 4, "training", size=12, fill=theme.accent)
    canvas.text(place(*validations[0])[0], place(*validations[0])[1] + 20, "validation", size=12, anchor="middle")


def _frequencies(canvas: Canvas, place: Callable[[float, float], tuple[float, float]], last: int, loss: float) -> None:
    canvas.line([place(0, loss), place(last, loss)], stroke=canvas.theme.compute, width=1.5, dashes="5 4")
    x, y = place(last, loss)
    canvas.text(x, y - 6, f"token frequencies alone {loss:.2f}", size=12, fill=canvas.theme.faint, anchor="end")


def _bars(canvas: Canvas, compared: Mapping[str, Any]) -> None:
    theme = canvas.theme
    most = max(run["inter_node_bytes"] for run in compared.values())
    count = max(iteration for run in compared.values() for iteration, _ in curve(run["losses"]))
    canvas.text(BARS, 24, "Bytes per step between nodes", size=15, bold=True)
    canvas.text(BARS, 42, f"into one node, and the training loss of iteration {count}", size=12, fill=theme.faint)
    for index, ((name, run), colour) in enumerate(zip(compared.items(), (theme.intra, theme.accent, theme.inter), strict=True)):
        y, width = TOP + index * ROW + 16, max(1.0, MOST_WIDTH * run["inter_node_bytes"] / most)
        canvas.text(BARS, y - 5, name, size=13, bold=True)
        canvas.text(BARS + 68, y - 5, f"loss {curve(run['losses'])[-1][1]:.3f}", size=12, fill=theme.faint)
        canvas.rect(BARS, y, width, BAR, fill=colour)
        share = "" if run["inter_node_bytes"] == most else f" ({run['inter_node_bytes'] / most:.2f})"
        canvas.text(BARS + width + 8, y + 17, f"{run['inter_node_bytes'] / 1e6:.2f} MB{share}", size=13)
