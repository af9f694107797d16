"""The life of one unit: which rungs of its weights hold something during a step, by the engine's own schedule and residency."""

from __future__ import annotations

from dataclasses import dataclass

from docs.drawing.canvas import Canvas, Theme
from megatron_zpp.comm.code import Code
from megatron_zpp.parallel.specs import Use
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.policy import POLICIES, ZEROPP, Policy, Rung, with_secondary_weights, with_weight_differences
from megatron_zpp.zero.residency import Residency
from megatron_zpp.zero.schedule import Actions, Moment, Phase, Prefetch, training_schedule

NAMES = ("embedding", "block 0", "block 1", "block 2", "block 3", "head")
UNIT = "block 1"
USES = tuple(Use(name, (name,), needs_weights_in_backward=name != "embedding") for name in NAMES)
LEAN = with_weight_differences(with_secondary_weights(POLICIES[3]), Code.gaussian(3, 1))
ROWS = {"ZeRO-3": POLICIES[3], "ZeRO++": ZEROPP, "lean": LEAN}
RUNGS = (Rung.FULL, Rung.SECONDARY, Rung.PRIMARY)
LEFT, TOP, CELL, HIGH, GAP = 196, 96, 50, 24, 30
UPDATE = "update"


@dataclass(frozen=True)
class State:
    """What a rung holds at a moment: nothing, values on their way, the current values, or a copy that lacks the last update."""

    is_there: bool = False
    is_on_its_way: bool = False
    is_stale: bool = False


def columns() -> list[str]:
    """The moments of a step in words: the use that computes, or the update."""
    return [NAMES[moment.use] for moment in _moments()] + [UPDATE]


def life(policy: Policy) -> list[dict[Rung, State]]:
    """The rungs of UNIT at each of these moments, while a step computes that is not the first."""
    unit, found = _Unit(policy), [dict[Rung, State]()]
    schedule = training_schedule(USES, Prefetch())
    for _ in range(2):  # the second step begins with what the first has left
        found = []
        for moment, actions in schedule.items():
            unit.act(actions)
            if moment in _moments():
                found.append(unit.states())
        unit.residency.invalidate()
        found.append(unit.states())
    return found


class _Unit:
    """Carries out the schedule on the record of UNIT alone. A climb has landed when its unit is waited for."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.residency: Residency[str] = Residency(policy, Topology(4, 2, 2))

    def act(self, actions: Actions) -> None:
        if UNIT in actions.rest:
            self.residency.rest()
        for rung, names in ((Rung.SECONDARY, actions.climb_to_secondary), (Rung.FULL, actions.climb_to_full)):
            if UNIT in names:
                for missing in self.residency.needs(rung):
                    self.residency.submitted(missing, UNIT)
        if UNIT in actions.wait and not self.residency.is_fresh(Rung.FULL):
            self.residency.landed()

    def states(self) -> dict[Rung, State]:
        under_way = self.residency.under_way()
        states = {rung: State(self.residency.is_fresh(rung), rung in under_way) for rung in RUNGS}
        states[Rung.PRIMARY] = State(is_there=True)
        kept = states[Rung.SECONDARY]
        if self._policy.keeps_copy and not kept.is_there:
            states[Rung.SECONDARY] = State(is_there=True, is_on_its_way=kept.is_on_its_way, is_stale=True)
        return states


def _moments() -> list[Moment]:
    computing = (Phase.PRE_FORWARD, Phase.PRE_BACKWARD)
    return [moment for moment in training_schedule(USES, Prefetch()) if moment.phase in computing]


def draw(theme: Theme) -> Canvas:
    words = columns()
    height = TOP + len(ROWS) * (len(RUNGS) * HIGH + GAP) + 18
    canvas = Canvas(
        LEFT + len(words) * CELL + 20, height, theme, f"Where the weights of {UNIT} are during one step, by member of the family"
    )
    canvas.text(14, 24, f"Where the weights of one unit, {UNIT}, are during a step", size=15, bold=True)
    _head(canvas, words)
    for index, (name, policy) in enumerate(ROWS.items()):
        y = TOP + index * (len(RUNGS) * HIGH + GAP)
        canvas.text(14, y + 1.5 * HIGH + 5, name, size=15, bold=True)
        moments = life(policy)
        for place, rung in enumerate(RUNGS):
            canvas.text(LEFT - 10, y + place * HIGH + 16, rung.name.lower(), size=12, fill=theme.faint, anchor="end")
            for column, states in enumerate(moments):
                _cell(canvas, LEFT + column * CELL, y + place * HIGH, rung, states[rung])
    _legend(canvas, height - 20)
    return canvas


def _head(canvas: Canvas, words: list[str]) -> None:
    theme, forward = canvas.theme, len(NAMES)
    for start, end, name in ((0, forward, "forward"), (forward, len(words) - 1, "backward"), (len(words) - 1, len(words), "")):
        x = LEFT + start * CELL
        canvas.line([(x + 2, 54), (LEFT + end * CELL - 6, 54)], stroke=theme.line, width=2)
        canvas.text(x + 2, 48, name, size=12, fill=theme.faint)
    for column, word in enumerate(words):
        is_own = word == UNIT
        short = word.replace("embedding", "embed.")
        canvas.text(LEFT + (column + 0.5) * CELL - 2, 76, short, size=11, anchor="middle", bold=is_own, fill=theme.accent if is_own else "")


def _cell(canvas: Canvas, x: float, y: float, rung: Rung, state: State) -> None:
    theme = canvas.theme
    colour = {Rung.FULL: theme.intra, Rung.SECONDARY: theme.inter, Rung.PRIMARY: theme.compute}[rung]
    canvas.rect(x, y, CELL - 3, HIGH - 4, stroke=theme.line, dashes="2 2")
    if state.is_there:
        canvas.rect(x, y, CELL - 3, HIGH - 4, fill=colour, opacity=0.4 if state.is_stale else 1)
    if state.is_on_its_way:
        canvas.rect(x + 3, y + 6, CELL - 9, HIGH - 16, fill=colour, stroke=theme.ink)


def _legend(canvas: Canvas, y: float) -> None:
    theme = canvas.theme
    canvas.rect(LEFT, y, 22, 12, fill=theme.intra)
    canvas.text(LEFT + 28, y + 10.5, "there", size=12, fill=theme.faint)
    canvas.rect(LEFT + 80, y + 2, 22, 8, fill=theme.intra, stroke=theme.ink)
    canvas.text(LEFT + 108, y + 10.5, "on its way", size=12, fill=theme.faint)
    canvas.rect(LEFT + 192, y, 22, 12, fill=theme.inter, opacity=0.4)
    canvas.text(LEFT + 220, y + 10.5, "kept copy that lacks the last update", size=12, fill=theme.faint)
