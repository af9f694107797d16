"""Two islands over sixteen steps: the weights of one unit, which units are exchanged, and the bytes of every step beside those of lean."""

from __future__ import annotations

from docs.drawing.canvas import Canvas, Theme
from megatron_zpp.outer.options import OuterOptions

PERIOD, STEPS = 8, 16
UNITS = ("embedding", "block 0", "block 1", "block 2", "block 3", "head")
NUMELS = (3, 4, 4, 4, 4, 3)  # in proportion
SHOWN = 2  # the unit whose weights are drawn
LEFT, TOP, STEP = 178, 44, 36
WEIGHTS, ROW, BARS = 104, 19, 58  # heights


def due(step: int) -> list[bool]:
    """Which units are exchanged after this many steps."""
    return OuterOptions(PERIOD).is_due(NUMELS, step)


def draw(theme: Theme) -> Canvas:
    right = LEFT + STEP * STEPS
    canvas = Canvas(
        right + 24, TOP + WEIGHTS + ROW * len(UNITS) + BARS + 92, theme, "Two islands train apart; units of the model take turns to agree"
    )
    canvas.text(14, 24, f"Two islands, each unit exchanged every {PERIOD} steps (H = {PERIOD})", size=15, bold=True)
    for step in range(1, STEPS + 1):
        canvas.text(_x(step), TOP + 10, f"{step}", size=11, fill=theme.faint, anchor="middle")
    canvas.text(LEFT - 14, TOP + 10, "step", size=11, fill=theme.faint, anchor="end")
    _weights(canvas, TOP + 18)
    _turns(canvas, TOP + WEIGHTS + 26)
    _bytes(canvas, TOP + WEIGHTS + ROW * len(UNITS) + 44)
    return canvas


def _x(step: int) -> float:
    return LEFT + STEP * (step - 0.5)


def _weights(canvas: Canvas, y: float) -> None:
    """Paths that part after each exchange and meet at the next. They are no measurement."""
    theme = canvas.theme
    canvas.text(14, y + 34, f"weights of {UNITS[SHOWN]}", size=13, bold=True)
    canvas.lines(14, y + 51, ("on either island, and", "what both then share"), size=11, fill=theme.faint)
    for side, colour in ((-1, theme.slices[0]), (1, theme.slices[2])):
        points, apart = [(float(LEFT), y + 14)], 0.0
        for step in range(1, STEPS + 1):
            apart = (apart**2 + 90) ** 0.5
            middle = y + 14 + 4.4 * step
            points.append((_x(step), middle + side * apart))
            if due(step)[SHOWN]:
                apart = 0.0
                points.append((_x(step), middle))
        canvas.line(points, stroke=colour, width=1.8)
    for step in filter(lambda step: due(step)[SHOWN], range(1, STEPS + 1)):
        canvas.rect(_x(step) - 5, y + 9 + 4.4 * step, 10, 10, fill=theme.inter, radius=5)


def _turns(canvas: Canvas, y: float) -> None:
    theme = canvas.theme
    for row, unit in enumerate(UNITS):
        canvas.text(LEFT - 14, y + ROW * row + 13, unit, size=12, anchor="end")
        for step in range(1, STEPS + 1):
            colour = theme.inter if due(step)[row] else "none"
            canvas.rect(_x(step) - 14, y + ROW * row + 2, 28, ROW - 5, fill=colour, stroke=theme.line)
    canvas.lines(14, y + 12, ("units take", "turns"), size=11, fill=theme.faint)


def _bytes(canvas: Canvas, y: float) -> None:
    """A unit that is exchanged moves what lean moves of it in every step: 3 bits per value each way."""
    theme, bottom = canvas.theme, y + BARS
    canvas.text(14, y + 22, "bytes of a step", size=13, bold=True)
    canvas.lines(14, y + 39, ("between the islands;", "lean in every step"), size=11, fill=theme.faint)
    for step in range(1, STEPS + 1):
        share = sum(numel for numel, is_due in zip(NUMELS, due(step), strict=True) if is_due) / sum(NUMELS)
        canvas.rect(_x(step) - 14, y, 28, BARS, stroke=theme.compute, dashes="3 3")
        if share:
            canvas.rect(_x(step) - 14, bottom - share * BARS, 28, share * BARS, fill=theme.inter)
    canvas.legend(
        LEFT, bottom + 12, {"exchange": theme.inter, "island 0": theme.slices[0], "island 1": theme.slices[2], "dashed: lean": "none"}
    )
