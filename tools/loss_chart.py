"""The losses of runs as rows of text for a terminal."""

import math
from collections.abc import Sequence

from braille import BrailleCanvas, Paint
from run_history import Axis, RunHistory

LABEL_COLUMNS = 13  # of the longest loss, such as -1.234e-100, and " |"
VALIDATION_MARK = "o"


def loss_chart(histories: Sequence[RunHistory], axis: Axis, columns: int, rows: int, paint: Paint) -> list[str]:
    """Training losses as lines and validations as marks, with the ends of both axes; several runs end in their numbers.

    Empty if nothing finite has been logged. rows: all, of which one is for the axis.
    """
    drawn = [history for history in histories if history.iterations]
    positions = [history.positions(axis) for history in drawn]
    validations = [
        [(history.place(iteration, at, axis), loss) for points in history.validations.values() for iteration, loss in points]
        for history, at in zip(drawn, positions, strict=True)
    ]
    curves = [list(zip(at, history.losses().values(), strict=True)) for history, at in zip(drawn, positions, strict=True)]
    shown = [point for curve in [*curves, *validations] for point in curve if math.isfinite(point[1])]
    if not shown:
        return []
    left, right = min(x for x, _ in shown), max(x for x, _ in shown)
    low, high = min(y for _, y in shown), max(y for _, y in shown)

    def share(point: tuple[float, float]) -> tuple[float, float]:
        return (point[0] - left) / (right - left or 1.0), (point[1] - low) / (high - low) if high > low else 0.5

    canvas = BrailleCanvas(max(1, columns - LABEL_COLUMNS), max(1, rows - 1))
    for history, curve in zip(drawn, curves, strict=True):
        canvas.line([share(point) for point in curve], histories.index(history))
    for history, curve, points in zip(drawn, curves, validations, strict=True):
        ink = histories.index(history)
        for point in points:
            canvas.mark(*share(point), VALIDATION_MARK, ink)
        end = next((point for point in reversed(curve) if math.isfinite(point[1])), None)
        if len(histories) > 1 and end is not None:
            canvas.mark(*share(end), str((ink + 1) % 10), ink)
    mark = f", {VALIDATION_MARK}: validation" if any(validations) else ""
    short = axis.label.split()[0]
    labels = (f"{axis.label}{mark}", f"{short}{mark}", short)
    return [*_labelled(canvas.text(paint), low, high), _axis_row(left, right, labels, columns)]


def _labelled(rows: Sequence[str], low: float, high: float) -> list[str]:
    """The rows with the loss before the first and the last of them."""
    labels = {len(rows) - 1: f"{low:.4g}", 0: f"{high:.4g}"}
    return [f"{labels.get(index, ''):>{LABEL_COLUMNS - 2}} |{row}" for index, row in enumerate(rows)]


def _axis_row(left: float, right: float, labels: Sequence[str], columns: int) -> str:
    """The ends of the axis, and between them the first label that fits."""
    start, end = f"{'loss':>{LABEL_COLUMNS - 2}}  {_number(left)}", _number(right)
    room = max(0, columns - len(start) - len(end))
    label = next((label for label in labels if len(label) + 2 <= room), "")
    return f"{start}{label:^{room}}{end}"[:columns]


def _number(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() and value < 1e9 else f"{value:g}"
