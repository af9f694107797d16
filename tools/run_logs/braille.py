"""A canvas for terminals: 2 x 4 dots per character, in Unicode's braille patterns."""

import math
from collections.abc import Callable, Sequence

BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column inside a character

Point = tuple[float, float]
Paint = Callable[[str, int], str]


class BrailleCanvas:
    """A canvas of columns x rows characters. Points are shares of its width and height, with (0, 0) at the lower left.

    ink: which curve a stroke belongs to; the last stroke through a character gives it its ink.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.columns = columns
        self.rows = rows
        self._characters = [[chr(BLANK)] * columns for _ in range(rows)]
        self._inks = [[0] * columns for _ in range(rows)]

    def line(self, points: Sequence[Point], ink: int) -> None:
        """Straight strokes from point to point. One that is not finite interrupts the line."""
        before: tuple[int, int] | None = None
        for x, y in points:
            if not (math.isfinite(x) and math.isfinite(y)):
                before = None
                continue
            dot = self.dot(x, y)
            start = before or dot
            steps = max(1, abs(dot[0] - start[0]), abs(dot[1] - start[1]))
            for step in range(steps + 1):
                self._set(start[0] + round(step * (dot[0] - start[0]) / steps), start[1] + round(step * (dot[1] - start[1]) / steps), ink)
            before = dot

    def mark(self, x: float, y: float, character: str, ink: int) -> None:
        """A whole character at a point; none at one that is not finite."""
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        column, row = self.dot(x, y)
        self._characters[row // 4][column // 2] = character
        self._inks[row // 4][column // 2] = ink

    def text(self, paint: Paint) -> list[str]:
        """The rows from top to bottom. paint: gives a character its ink."""
        return [
            "".join(character if character == chr(BLANK) else paint(character, ink) for character, ink in zip(row, inks, strict=True))
            for row, inks in zip(self._characters, self._inks, strict=True)
        ]

    def dot(self, x: float, y: float) -> tuple[int, int]:
        """Column and row of a point's dot, counted from the upper left."""
        last_column, last_row = 2 * self.columns - 1, 4 * self.rows - 1
        return round(min(1.0, max(0.0, x)) * last_column), round((1 - min(1.0, max(0.0, y))) * last_row)

    def _set(self, column: int, row: int, ink: int) -> None:
        code = ord(self._characters[row // 4][column // 2])
        if BLANK <= code < BLANK + 256:  # else it is a mark
            self._characters[row // 4][column // 2] = chr(code | DOTS[row % 4][column % 2])
            self._inks[row // 4][column // 2] = ink
