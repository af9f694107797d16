"""The house: rooms on floors, as import-linter holds them (pyproject.toml). Imports point downwards only."""

from __future__ import annotations

import re
from pathlib import Path

from docs.drawing.canvas import Canvas, Theme

ROOT = Path(__file__).resolve().parents[2]
SAYS = {
    "entry": "pretrain_zeropp_gpt.py, tools/, examples/",
    "training": "start-up checks, the loop, one step",
    "checkpoint": "manifest, save, load, export",
    "outer": "islands, and the steps that join them",
    "model": "the GPT",
    "zero": "units, schedule, engine, optimizer",
    "data": "corpora, samples, tokenizers",
    "tensor_parallel": "layers that ranks share, samples they divide",
    "comm": "lanes, links, codecs, ledger of bytes",
    "parallel": "grid of ranks, groups, start-up",
    "ops": "codes, dropout, loss; kernels in csrc/",
    "config": "flags and their rules",
    "monitor": "log lines, timers, memory",
    "system": "files, locks, signals, what comes from outside",
}
LEFT, TOP, WIDTH, FLOOR, HIGH, GAP = 40, 20, 760, 62, 50, 10


def floors() -> list[list[str]]:
    """The rooms of each floor, the highest first. Raises ValueError if a room has no words here, or words have no room."""
    layers = re.search(r"\nlayers = \[\n(.*?)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.DOTALL)
    rooms = [["entry"]] + [re.findall(r"\w+", line) for line in (layers.group(1).splitlines() if layers else [])]
    found = {room for floor in rooms for room in floor}
    if found != set(SAYS):
        raise ValueError(f"the house has the rooms {sorted(found)}, and this picture has words for {sorted(SAYS)}")
    return rooms


def draw(theme: Theme) -> Canvas:
    rooms = floors()
    canvas = Canvas(
        LEFT + WIDTH + 76, TOP + len(rooms) * FLOOR + 6, theme, "The rooms of the house, floor by floor; imports point downwards"
    )
    for index, floor in enumerate(rooms):
        y = TOP + index * FLOOR
        canvas.text(14, y + HIGH / 2 + 5, str(len(rooms) - 1 - index), size=14, fill=theme.faint)
        wide = (WIDTH - GAP * (len(floor) - 1)) / len(floor)
        for place, room in enumerate(floor):
            x = LEFT + place * (wide + GAP)
            is_core = room in ("zero", "comm")
            canvas.rect(x, y, wide, HIGH, fill=theme.paper, stroke=theme.intra if is_core else theme.line, radius=6)
            canvas.text(x + wide / 2, y + 21, room, size=14, bold=True, anchor="middle")
            canvas.text(x + wide / 2, y + 39, SAYS[room], size=11.5, fill=theme.faint, anchor="middle")
    x = LEFT + WIDTH + 22
    canvas.line([(x, TOP + 6), (x, TOP + len(rooms) * FLOOR - 18)], stroke=theme.faint, width=1.6, arrow=True)
    canvas.text(x + 8, TOP + 24, "imports", size=11, fill=theme.faint)
    return canvas
