"""The rungs: one unit of four slices on 2 nodes of 2 ranks, whose payloads climb and descend between three rungs."""

from __future__ import annotations

from dataclasses import dataclass

from docs.drawing.canvas import Canvas, Theme
from megatron_zpp.parallel.topology import Link, Topology

WORLD = Topology(4, 2, 2)
RANKS = 4
RUNGS = ("full", "secondary", "primary")
HELD = {
    "full": "the whole unit on every rank",
    "secondary": "1/G of it, the same in every node",
    "primary": "1/D, each rank's own slice",
}
SLOT, HIGH = 24, 24
LEFT, TOP = 196, 62
RANK_STEP, NODE_GAP, RUNG_STEP = 122, 30, 92
SECONDS = 16


@dataclass(frozen=True)
class Move:
    """Something that moves in a part of the loop: from `start` to `end` percent of its time."""

    name: str
    start: int
    end: int


CLIMB_INTER, CLIMB_INTRA = Move("climb-inter", 6, 20), Move("climb-intra", 24, 36)
DESCEND_INTRA, DESCEND_INTER = Move("descend-intra", 54, 68), Move("descend-inter", 72, 86)
SAID = {
    CLIMB_INTER: "1  Weights climb between the nodes: in 8 bits with ZeRO++, as differences in 3 bits with lean.",
    CLIMB_INTRA: "2  They climb inside each node. Forward and backward compute with the whole unit.",
    DESCEND_INTRA: "3  Gradients descend inside each node, and each rank takes the mean of its part in fp32.",
    DESCEND_INTER: "4  The means descend between the nodes: in 4 bits or 3. AdamW updates each rank's own slice.",
}


def draw(theme: Theme) -> Canvas:
    right = _x(3, 4) + 16
    canvas = Canvas(
        right + 176, 404, theme, "Three rungs: weights climb from primary to secondary to full, gradients descend the same way", _style()
    )
    _nodes(canvas)
    for rung, name in enumerate(RUNGS):
        canvas.text(14, _y(rung) + 11, name, size=15, bold=True)
        canvas.lines(14, _y(rung) + 27, _wrapped(HELD[name]), size=11, fill=theme.faint)
        for rank in range(RANKS):
            _bar(canvas, rung, rank)
    _links(canvas, right + 12)
    _payloads(canvas)
    for index, (move, words) in enumerate(SAID.items()):
        canvas.text(LEFT - 12, 318 + 24 * index, words, size=13.5, css=f' class="said {move.name}"')
    return canvas


def held(rung: str, rank: int) -> tuple[int, ...]:
    """The slices that `rank` has on a rung, in order."""
    if rung == "primary":
        return (WORLD.slice_of(rank),)
    members = WORLD.members(Link.INTER, rank) if rung == "secondary" else range(RANKS)
    return tuple(sorted(map(WORLD.slice_of, members)))


def _x(rank: int, place: int) -> float:
    return LEFT + rank * RANK_STEP + rank // WORLD.ranks_per_node * NODE_GAP + place * SLOT


def _y(rung: int) -> float:
    return TOP + rung * RUNG_STEP


def _nodes(canvas: Canvas) -> None:
    for node in range(2):
        first = 2 * node
        x = _x(first, 0) - 12
        canvas.rect(x, 14, RANK_STEP + 4 * SLOT + 24, _y(2) + HIGH + 16 - 14, fill=canvas.theme.paper, stroke=canvas.theme.line, radius=8)
        canvas.text(x + 12, 33, f"node {node}", size=12, fill=canvas.theme.faint, bold=True)
    for rank in range(RANKS):
        canvas.text(_x(rank, 2), 52, f"rank {rank}", size=12, anchor="middle")


def _bar(canvas: Canvas, rung: int, rank: int) -> None:
    name, theme = RUNGS[rung], canvas.theme
    for place in range(RANKS):
        canvas.rect(_x(rank, place), _y(rung), SLOT - 2, HIGH, stroke=theme.line, dashes="2 2")
    for place in held(name, rank):
        canvas.rect(_x(rank, place), _y(rung), SLOT - 2, HIGH, fill=theme.slices[place], css=f' class="held {name}"')
        canvas.text(_x(rank, place) + SLOT / 2 - 1, _y(rung) + 16.5, str(place), size=12, fill="#fff", anchor="middle", bold=True)


def _links(canvas: Canvas, x: float) -> None:
    theme = canvas.theme
    for rung, colour, words in (
        (0, theme.intra, ("inside a node:", "fast")),
        (1, theme.inter, ("between nodes:", "slow")),
    ):
        top, bottom = _y(rung) + HIGH + 6, _y(rung + 1) - 6
        canvas.line([(x + 6, bottom), (x + 6, top)], stroke=theme.ink, width=2, arrow=True)
        canvas.line([(x + 24, top), (x + 24, bottom)], stroke=theme.gradient, width=2, arrow=True)
        canvas.lines(x + 40, (top + bottom) / 2 - 3, words, size=13, fill=colour)
    canvas.text(x, _y(0) + 11, "weights climb", size=12)
    canvas.text(x, _y(2) + 17, "gradients descend", size=12, fill=theme.gradient)


def _payloads(canvas: Canvas) -> None:
    """Each payload rests where it ends, invisible unless it moves. Those that stay on their rank move straight up or down."""
    for rank in range(RANKS):
        column, row = WORLD.members(Link.INTER, rank), WORLD.members(Link.INTRA, rank)
        own = WORLD.slice_of(rank)
        for other in column:
            _payload(canvas, CLIMB_INTER, (rank, 2), (other, 1), own)
            _payload(canvas, DESCEND_INTER, (rank, 1), (other, 2), WORLD.slice_of(other))
        for other in row:
            for place in held("secondary", rank):
                _payload(canvas, CLIMB_INTRA, (rank, 1), (other, 0), place)
            for place in held("secondary", other):
                _payload(canvas, DESCEND_INTRA, (rank, 0), (other, 1), place)


def _payload(canvas: Canvas, move: Move, origin: tuple[int, int], goal: tuple[int, int], place: int) -> None:
    x, y = _x(goal[0], place), _y(goal[1])
    across, down = _x(origin[0], place) - x, _y(origin[1]) - y
    theme = canvas.theme
    is_gradient = move in (DESCEND_INTRA, DESCEND_INTER)
    crosses = origin[0] != goal[0]
    canvas.rect(
        x + 4,
        y + 6,
        SLOT - 10,
        HIGH - 12,
        fill=theme.gradient if is_gradient else theme.slices[place],
        stroke=theme.ink if crosses else "none",
        radius=3,
        css=f' class="moves {move.name}" style="--x:{across:g}px;--y:{down:g}px"',
    )


def _style() -> str:
    """Without the wish for less movement, payloads move in a loop. Otherwise all rungs are shown filled."""
    loop = []
    for move in SAID:
        steps = (
            f"0%,{move.start}%{{transform:translate(var(--x),var(--y));opacity:0}}"
            f"{move.start + 1}%{{transform:translate(var(--x),var(--y));opacity:1}}"
            f"{move.end - 1}%{{transform:none;opacity:1}}{move.end}%,100%{{transform:none;opacity:0}}"
        )
        loop.append(f"@keyframes {move.name}{{{steps}}}.moves.{move.name}{{animation:{move.name} {SECONDS}s ease-in-out infinite}}")
    shown = {CLIMB_INTER: (0, 22), CLIMB_INTRA: (22, 52), DESCEND_INTRA: (52, 70), DESCEND_INTER: (70, 100)}
    for move, (start, end) in shown.items():
        before = f"0%,{start}%{{opacity:.3}}{start + 1}%" if start else "0%"
        after = f"{end}%,100%{{opacity:.3}}" if end < 100 else "100%{opacity:1}"
        steps = f"{before},{end - 1}%{{opacity:1}}{after}"
        loop.append(f"@keyframes say-{move.name}{{{steps}}}.said.{move.name}{{animation:say-{move.name} {SECONDS}s linear infinite}}")
    loop += [
        f"@keyframes secondary{{0%,{CLIMB_INTER.end - 1}%{{opacity:.12}}{CLIMB_INTER.end + 1}%,86%{{opacity:1}}90%,100%{{opacity:.12}}}}",
        f"@keyframes full{{0%,{CLIMB_INTRA.end - 1}%{{opacity:.12}}{CLIMB_INTRA.end + 1}%,52%{{opacity:1}}55%,100%{{opacity:.12}}}}",
        f".held.secondary{{animation:secondary {SECONDS}s linear infinite}}.held.full{{animation:full {SECONDS}s linear infinite}}",
    ]
    return ".moves{opacity:0}@media (prefers-reduced-motion: no-preference){" + "".join(loop) + "}"


def _wrapped(words: str) -> list[str]:
    """Two lines of about equal length."""
    parts = words.split()
    cut = min(range(1, len(parts)), key=lambda at: max(len(" ".join(parts[:at])), len(" ".join(parts[at:]))))
    return [" ".join(parts[:cut]), " ".join(parts[cut:])]
