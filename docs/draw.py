"""Draws the pictures of README and docs: `python -m docs.draw` writes docs/pictures/*.svg, each in a light and a dark look.

Every figure in them comes from the code or from benchmarks/results. tests/docs/test_pictures.py compares the files with what this makes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.drawing import house, islands, lanes, memory, payload, quickstart, rungs, speedup, time_to_loss, trace, unit_life
from docs.drawing.canvas import THEMES, Canvas, Theme

FOLDER = Path(__file__).resolve().parent / "pictures"
PICTURES: dict[str, Callable[[Theme], Canvas]] = {
    "house": house.draw,
    "islands": islands.draw,
    "lanes": lanes.draw,
    "memory": memory.draw,
    "payload": payload.draw,
    "quickstart": quickstart.draw,
    "rungs": rungs.draw,
    "speedup": speedup.draw,
    "time_to_loss": time_to_loss.draw,
    "trace": trace.draw,
    "unit_life": unit_life.draw,
}


def drawn() -> dict[str, str]:
    """The text of every picture by its file name."""
    return {f"{name}-{theme.name}.svg": draw(theme).svg() for name, draw in PICTURES.items() for theme in THEMES}


def main() -> None:
    for name, text in drawn().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
