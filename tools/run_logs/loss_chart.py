"""The losses of runs as rows of text for a terminal."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress

from run_logs.braille import BrailleCanvas, Paint
from run_logs.history import Axis, RunHistory

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
    finite = [_finite(at, history.all_losses) for history, at in zip(drawn, positions, strict=True)]
    finite_validations = [point for points in validations for point in points if math.isfinite(point[1])]
    places = [place for at, _ in finite if at for place in (min(at), max(at))] + [place for place, _ in finite_validations]
    losses = [loss for _, of_run in finite if of_run for loss in (min(of_run), max(of_run))] + [loss for _, loss in finite_validations]
    if not losses:
        return []
    left, right, low, high = min(places), max(places), min(losses), max(losses)
    canvas = BrailleCanvas(max(1, columns - LABEL_COLUMNS), max(1, rows - 1))

    def share(point: tuple[float, float]) -> tuple[float, float]:
        return (point[0] - left) / (right - left or 1.0), (point[1] - low) / (high - low) if high > low else 0.5

    def dot_column(place: float) -> int:
        return canvas.dot(*share((place, low)))[0]

    for history, at in zip(drawn, positions, strict=True):
        canvas.line([share(point) for point in outline(at, history.all_losses, dot_column)], histories.index(history))
    for history, (at, of_run), points in zip(drawn, finite, validations, strict=True):
        ink = histories.index(history)
        for point in points:
            canvas.mark(*share(point), VALIDATION_MARK, ink)
        if len(histories) > 1 and at:
            canvas.mark(*share((at[-1], of_run[-1])), str((ink + 1) % 10), ink)
    mark = f", {VALIDATION_MARK}: validation" if any(validations) else ""
    short = axis.label.split()[0]
    labels = (f"{axis.label}{mark}", f"{short}{mark}", short)
    return [*_labelled(canvas.text(paint), low, high), _axis_row(left, right, labels, columns)]


def outline(places: Sequence[float], losses: Sequence[float], dot_column: Callable[[float], int]) -> Iterator[tuple[float, float]]:
    """Points of a curve whose strokes have the same dots as those of all its points: few, however long the run is.

    In one column of dots, strokes between neighbours have all dots from the lowest to the highest point. So the first, the lowest, the
    highest and the last point are enough, unless one that is not finite interrupts the line. places: ascending.
    """
    start = 0
    while start < len(places):
        end = bisect_right(places, dot_column(places[start]), start, key=dot_column)
        part = losses[start:end]
        kept: Iterable[int] = range(len(part))
        if all(map(math.isfinite, part)):
            kept = sorted({0, part.index(min(part)), part.index(max(part)), len(part) - 1})
        yield from ((places[start + index], part[index]) for index in kept)
        start = end


def _finite(places: Sequence[float], losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """The places of the losses that are finite, and these losses."""
    return list(compress(places, map(math.isfinite, losses))), list(filter(math.isfinite, losses))


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
