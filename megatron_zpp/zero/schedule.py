"""Schedules when units climb and rest. A schedule is computed once from uses and prefetch, never recorded from a run (no torch).

A pass over the model is a list of moments. At each moment the engine first frees units (rest), then submits climbs (those of this use and
of the uses ahead), then waits for the units of this use. For a model of embedding, two blocks and a head that shares the embedding,
with two uses ahead over the inter link and one over the intra link:

    moment              rest            climb to secondary    climb to full     wait
    pre_forward  0      -               emb b0 b1             emb b0            emb
    post_forward 0      emb             -                     -                 -
    pre_forward  1      -               b0 b1 head emb        b0 b1             b0
    post_forward 1      b0              -                     -                 -
    pre_forward  2      -               b1 head emb           b1 head emb       b1
    post_forward 2      b1              -                     -                 -
    pre_forward  3      -               head emb b1 b0        head emb b1       head emb
    post_forward 3      -               (the last use keeps its weights for its backward)
    pre_backward 3      -               head emb b1 b0        head emb b1       head emb
    pre_backward 2      head emb        b1 b0                 b1 b0             b1
    pre_backward 1      b1              b0                    b0                b0
    pre_backward 0      b0              -                     -                 -

A column of climbs lists, in order, every climb that must have been submitted by then. The engine skips those that are on their way or
fresh. So one schedule serves every policy, evaluation between steps, and skipped steps. After backward the units of the first use rest,
which the table omits.

A call of the whole module, within which the others are made, comes first in forward and first in backward. Its units rest at the end only:

    pre_forward  0, those of the others, post_forward 0, pre_backward 0, those of the others
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_zpp.parallel.specs import Use, outer_units


class Phase(enum.Enum):
    """The kinds of moments."""

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PRE_BACKWARD = "pre_backward"
    RECOMPUTE = "recompute"  # a use's forward runs again, within backward
    AFTER_BACKWARD = "after_backward"


@dataclass(frozen=True)
class Moment:
    """A point in a pass: one hook of one use. AFTER_BACKWARD comes once, for use 0."""

    phase: Phase
    use: int


@dataclass(frozen=True)
class Actions:
    """What the engine does at a moment, in this order; all entries are unit names.

    is_sure: whether some rank reaches the moment, so that all have to act on it. Otherwise every rank reaches a moment that is not sure in
    this backward, or none does.
    """

    rest: tuple[str, ...] = ()
    climb_to_secondary: tuple[str, ...] = ()
    climb_to_full: tuple[str, ...] = ()
    wait: tuple[str, ...] = ()
    is_sure: bool = True


@dataclass(frozen=True)
class Prefetch:
    """How many uses ahead climbs are submitted over each link. A secondary rung takes 1/G of a full one, on G ranks of a partition."""

    inter_uses: int = 2
    intra_uses: int = 1


Schedule = Mapping[Moment, Actions]  # in the order of time


class Pass:
    """One pass over the model, moment by moment; `schedule` says what is due at each.

    A rank can miss moments, because it skipped a use or the output of a use got no gradient. The next moment that it reaches, or the end of
    forward, makes up for them: every rank must act on the same moments in the same order, whichever modules its own samples went through.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._moments = tuple(schedule)
        self._index_of = {moment: index for index, moment in enumerate(self._moments)}
        self._end_of_forward = sum(moment.phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD) for moment in schedule)
        self._position = 0
        self._is_beyond_sure = False  # whether backward has reached a moment that is not sure, so that all ranks reach the others, too

    def begin(self) -> None:
        """A new pass begins."""
        self._position = 0
        self._is_beyond_sure = False

    def is_ahead(self, moment: Moment) -> bool:
        """Whether the moment belongs to this schedule and has not been passed yet."""
        return self._index_of.get(moment, -1) >= self._position

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun and has not come to its end."""
        return self._end_of_forward < self._position < len(self._moments)

    def due_at(self, moment: Moment) -> list[tuple[Moment, Actions]]:
        """The moments that were missed, then this one, with their actions. A moment earlier than the last one begins a new pass.

        Missed moments are made up for because other ranks may have reached them, and their collectives wait for this rank.
        """
        index = self._index_of[moment]
        if index < self._position:
            self.begin()
        self._is_beyond_sure |= not self._schedule[moment].is_sure
        return self._due_before(index + 1)

    def due_at_end_of_forward(self) -> list[tuple[Moment, Actions]]:
        """The moments of forward that were missed since the last one, with their actions."""
        return self._due_before(self._end_of_forward)

    def due_at_end_of_backward(self) -> list[tuple[Moment, Actions]]:
        """The moments of backward that were missed since the last one, with their actions. The backward of another forward begins."""
        due = self._due_before(len(self._moments))
        self._position = self._end_of_forward
        self._is_beyond_sure = False
        return due

    def _due_before(self, end: int) -> list[tuple[Moment, Actions]]:
        start, self._position = self._position, max(self._position, end)
        due = ((moment, self._schedule[moment]) for moment in self._moments[start:end])
        return [(moment, actions) for moment, actions in due if actions.is_sure or self._is_beyond_sure]


def training_schedule(uses: Sequence[Use], prefetch: Prefetch) -> Schedule:
    """The actions of forward and backward.

    A use that is recomputed alone needs no extra moment: its weights are already gathered for its backward. A chunk of several uses is
    recomputed from its first use to its last, once the gradient of its last use has come. The units of each use climb when its turn comes
    and rest after its own backward. So units climb as often as without recomputation, but all units of a chunk are full at the same time.
    With both blocks of the model above in one chunk:

        moment              rest            climb to secondary    climb to full     wait
        pre_backward 2      head emb        -                     -                 -
        recompute    1      -               b0 b1                 b0 b1             b0
        recompute    2      -               b1 b0                 b1 b0             b1
        pre_backward 1      b1              b0                    b0                b0
        pre_backward 0      b0              -                     -                 -
    """
    first, last, outer = _first_inner(uses), len(uses) - 1, outer_units(uses)
    backward = [stop for chunk in reversed(_chunks(uses)) for stop in _backward_stops(uses, chunk)]
    sure, unsure = ([stop for stop in backward if uses[stop.moment.use].backward_is_sure is is_sure] for is_sure in (True, False))
    actions = _climbs(_forward_stops(uses) + sure, prefetch)
    for stop in unsure:
        actions[stop.moment] = Actions((), stop.units, stop.units, stop.units, is_sure=False)
    for index in range(first, last):
        actions[Moment(Phase.POST_FORWARD, index)] = Actions(rest=_without(uses[index].units, uses[index + 1].units, outer))
        at = Moment(Phase.PRE_BACKWARD, index)
        rest = _without(uses[index + 1].units, _read_in_backward(uses[index]), outer)
        actions[at] = replace(actions.get(at, Actions()), rest=rest)
    actions[Moment(Phase.POST_FORWARD, last)] = Actions(rest=_without(uses[last].units, _read_in_backward(uses[last]), outer))
    if outer:
        actions[Moment(Phase.PRE_BACKWARD, 0)] = Actions((), outer, outer, outer)
    first_sure = next((index for index in range(first, last) if uses[index].backward_is_sure), last)
    at_the_end = dict.fromkeys((*outer, *(unit for use in uses[first : first_sure + 1] for unit in use.units)))
    actions[Moment(Phase.AFTER_BACKWARD, 0)] = Actions(rest=tuple(at_the_end))
    return _in_order_of_time(actions, uses)


def evaluation_schedule(uses: Sequence[Use], prefetch: Prefetch) -> Schedule:
    """The actions of a forward without gradients: units rest right after their use."""
    first, outer = _first_inner(uses), outer_units(uses)
    actions = _climbs(_forward_stops(uses), prefetch)
    for index in range(first, len(uses)):
        following = uses[index + 1].units if index + 1 < len(uses) else ()
        actions[Moment(Phase.POST_FORWARD, index)] = Actions(rest=_without(uses[index].units, following, outer))
    if outer:
        actions[Moment(Phase.POST_FORWARD, 0)] = Actions(rest=outer)
    return _in_order_of_time(actions, uses)


def backward_starts(uses: Sequence[Use]) -> tuple[Moment, ...]:
    """For each use, the moment after which its backward runs: its PRE_BACKWARD; for the last use of a recomputed chunk, its RECOMPUTE."""
    starts = [Moment(Phase.PRE_BACKWARD, index) for index in range(len(uses))]
    for chunk in _chunks(uses):
        if len(chunk) > 1:
            starts[chunk[-1]] = Moment(Phase.RECOMPUTE, chunk[-1])
    return tuple(starts)


def descent_order(uses: Sequence[Use]) -> tuple[str, ...]:
    """Every unit once, in the order in which their gradients descend: a unit is complete after the backward of its first use."""
    first_use = first_uses(uses)
    return tuple(sorted(first_use, key=lambda unit: -first_use[unit]))


def first_uses(uses: Sequence[Use]) -> dict[str, int]:
    """By unit, the index of the first use that reads it."""
    first_use: dict[str, int] = {}
    for index, use in enumerate(uses):
        for unit in use.units:
            first_use.setdefault(unit, index)
    return first_use


def update_groups(names: Sequence[str], actions: Iterable[Actions], *, at_once: bool) -> list[list[int]]:
    """Indices of the units in groups. The units that the next step needs first come first, so that they climb early.

    names: of the units that are trained; others have no updates.
    actions: of the moments of a training step, in the order of time. Units come in the order of their first climbs.
    at_once: of a device that runs behind the host. It gets two groups, what the first moment needs and all others, because each update
    takes the host some time. Otherwise each unit is a group, so that it can climb while the next is updated.
    """
    first_moment, *later = [[name for name in (*due.climb_to_full, *due.climb_to_secondary) if name in names] for due in actions]
    first = [names.index(name) for name in dict.fromkeys(first_moment)]
    in_order = dict.fromkeys([*(names.index(name) for needed in later for name in needed), *range(len(names))])
    others = [index for index in in_order if index not in first]
    if at_once:
        return [group for group in (first, others) if group]
    return [[index] for index in (*first, *others)]


@dataclass(frozen=True)
class _Stop:
    """A moment at which units must be full."""

    moment: Moment
    units: tuple[str, ...]


def _first_inner(uses: Sequence[Use]) -> int:
    """The index of the first use that is not the call of the whole module."""
    return int(bool(outer_units(uses)))


def _chunks(uses: Sequence[Use]) -> list[range]:
    """Neighbouring uses that are recomputed as one, in order; each of the remaining uses is a chunk of its own.

    Without the call of the whole module.
    """
    chunks: list[range] = []
    for index, use in list(enumerate(uses))[_first_inner(uses) :]:
        if chunks and use.recomputed_in is not None and use.recomputed_in == uses[index - 1].recomputed_in:
            chunks[-1] = range(chunks[-1].start, index + 1)
        else:
            chunks.append(range(index, index + 1))
    return chunks


def _forward_stops(uses: Sequence[Use]) -> list[_Stop]:
    """The stops in forward. What the call of the whole module reads is full from its own stop on."""
    first, outer = _first_inner(uses), outer_units(uses)
    stops = [_Stop(Moment(Phase.PRE_FORWARD, index), use.units) for index, use in enumerate(uses)]
    return [*stops[:first], *(_Stop(stop.moment, _without(stop.units, outer)) for stop in stops[first:])]


def _backward_moments(chunk: range) -> list[Moment]:
    last, *others = (Moment(Phase.PRE_BACKWARD, index) for index in reversed(chunk))
    again = [Moment(Phase.RECOMPUTE, index) for index in chunk] if others else []
    return [last, *again, *others]


def _backward_stops(uses: Sequence[Use], chunk: range) -> list[_Stop]:
    """The stops of a chunk in backward. The last of several uses stops at its recomputation only: its backward follows at once.

    What the call of the whole module reads is full already.
    """
    moments, outer = _backward_moments(chunk), outer_units(uses)
    read = {Phase.RECOMPUTE: lambda use: use.units, Phase.PRE_BACKWARD: _read_in_backward}
    return [_Stop(moment, _without(read[moment.phase](uses[moment.use]), outer)) for moment in (moments[1:] if len(chunk) > 1 else moments)]


def _climbs(stops: Sequence[_Stop], prefetch: Prefetch) -> dict[Moment, Actions]:
    actions = {}
    for index, stop in enumerate(stops):
        to_secondary = _units_ahead(stops, index, prefetch.inter_uses)
        to_full = _units_ahead(stops, index, prefetch.intra_uses)
        actions[stop.moment] = Actions((), to_secondary, to_full, stop.units)
    return actions


def _in_order_of_time(actions: Mapping[Moment, Actions], uses: Sequence[Use]) -> Schedule:
    chunks = _chunks(uses)
    forward = [Moment(phase, use) for chunk in chunks for use in chunk for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)]
    backward = [moment for chunk in reversed(chunks) for moment in _backward_moments(chunk)]
    if outer_units(uses):
        forward = [Moment(Phase.PRE_FORWARD, 0), *forward, Moment(Phase.POST_FORWARD, 0)]
        backward = [Moment(Phase.PRE_BACKWARD, 0), *backward]
    moments = [*forward, *backward, Moment(Phase.AFTER_BACKWARD, 0)]
    return {moment: actions[moment] for moment in moments if moment in actions}


def _units_ahead(stops: Sequence[_Stop], index: int, uses_ahead: int) -> tuple[str, ...]:
    """The units of this stop and of the next `uses_ahead` stops that add units, each once, in the order of need.

    The search ends before a stop that needs one of these units again: the unit may rest before that stop, and climbs again only after that.
    """
    units = list(stops[index].units)
    found = 0
    for before, stop in itertools.pairwise(stops[index:]):
        is_turn = stop.moment.use == before.moment.use  # from forward to backward of one use, nothing rests
        if found == uses_ahead or (not is_turn and set(units) & set(stop.units)):
            break
        added = _without(stop.units, units)
        units += added
        found += bool(added)
    return tuple(units)


def _read_in_backward(use: Use) -> tuple[str, ...]:
    return use.units if use.needs_weights_in_backward else ()


def _without(units: Sequence[str], *others: Sequence[str]) -> tuple[str, ...]:
    return tuple(unit for unit in units if not any(unit in some for some in others))
