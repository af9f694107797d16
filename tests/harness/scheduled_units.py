"""Reads a schedule without an engine: which climbs it implies, and which units stand full when they are read."""

from __future__ import annotations

from megatron_zpp.parallel.specs import Use, outer_units
from megatron_zpp.parallel.topology import Direction, Lane, Link
from megatron_zpp.zero.policy import Rung
from megatron_zpp.zero.schedule import Moment, Phase, Schedule

Submission = tuple[str, Lane]
INTER_CLIMB, INTRA_CLIMB = Lane(Link.INTER, Direction.CLIMB), Lane(Link.INTRA, Direction.CLIMB)


def chunks_of(uses: tuple[Use, ...]) -> list[list[int]]:
    """The uses that are recomputed together, and each of the others alone; without the call of the whole module."""
    numbers = [-1 - index if use.recomputed_in is None else use.recomputed_in for index, use in enumerate(uses)]
    chunks = [[index for index, other in enumerate(numbers) if other == number] for number in dict.fromkeys(numbers)]
    return chunks[bool(outer_units(uses)) :]


def forward_moments(uses: tuple[Use, ...], *, is_training: bool = True) -> list[Moment]:
    """In training, the call of the whole module has no end: its weights stay for backward."""
    outer = int(bool(outer_units(uses)))
    inner = [Moment(phase, index) for index in range(outer, len(uses)) for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)]
    before, after = [Moment(Phase.PRE_FORWARD, 0)] * outer, [Moment(Phase.POST_FORWARD, 0)] * outer
    return [*before, *inner, *([] if is_training else after)]


def backward_moments(uses: tuple[Use, ...]) -> list[Moment]:
    """As hooks announce them: the gradient of a chunk's output arrives, its uses run forward again, then backward goes through them.

    It does not go through uses to which it is not sure to come.
    """
    moments = [Moment(Phase.PRE_BACKWARD, 0)] * bool(outer_units(uses))
    for chunk in reversed(chunks_of(uses)):
        last, *others = reversed(chunk)
        moments.append(Moment(Phase.PRE_BACKWARD, last))
        moments += [Moment(Phase.RECOMPUTE, index) for index in chunk if others]
        moments += [Moment(Phase.PRE_BACKWARD, index) for index in others]
    reached = [moment for moment in moments if uses[moment.use].backward_is_sure]
    return [*reached, Moment(Phase.AFTER_BACKWARD, 0)]


class ScheduledUnits:
    """Units that climb when a schedule first lists them, and rest on the rung `weights_in_step` whenever it lets them.

    Fails if a unit is waited for that nobody has sent for, or read while it does not stand full.
    """

    def __init__(self, uses: tuple[Use, ...], weights_in_step: Rung = Rung.PRIMARY) -> None:
        self._uses = uses
        self._weights_in_step = weights_in_step
        self._chunk_of = {index: chunk for chunk in [[0], *chunks_of(uses)] for index in chunk}
        self._outer = [0] * bool(outer_units(uses))  # full from the beginning to the end
        self._on_secondary: set[str] = set()  # there or on the way
        self._climbing: set[str] = set()  # to the full rung
        self._full: set[str] = set()
        self.submissions: list[Submission] = []
        self.most_full = 0

    @property
    def at_rest(self) -> bool:
        return not self._full | self._climbing | self._on_secondary

    def climbs(self, lane: Lane) -> list[str]:
        return [unit for unit, submitted in self.submissions if submitted == lane]

    def run(self, schedule: Schedule, moments: list[Moment]) -> None:
        for moment in moments:
            assert moment in schedule, f"no actions for {moment}"
            if self._weights_in_step is not Rung.FULL:
                self._full -= set(schedule[moment].rest)
            self.submit(schedule, moment)
            self._wait(schedule, moment)
            self._check_read(moment)
            self.most_full = max(self.most_full, len(self._full | self._climbing))

    def submit(self, schedule: Schedule, moment: Moment) -> None:
        """The climbs of a moment, without the rest of it."""
        for unit in schedule[moment].climb_to_full:
            self._submit_to_secondary(unit)
            if unit not in self._full | self._climbing:
                self._climbing.add(unit)
                self.submissions.append((unit, INTRA_CLIMB))
        for unit in schedule[moment].climb_to_secondary:
            self._submit_to_secondary(unit)

    def _submit_to_secondary(self, unit: str) -> None:
        if unit not in self._full | self._climbing | self._on_secondary:
            self._on_secondary.add(unit)
            self.submissions.append((unit, INTER_CLIMB))

    def _wait(self, schedule: Schedule, moment: Moment) -> None:
        for unit in schedule[moment].wait:
            assert unit in self._full | self._climbing, f"{unit} is waited for at {moment} and nobody submitted its climb"
            self._climbing.discard(unit)
            self._full.add(unit)
            if self._weights_in_step is not Rung.SECONDARY:
                self._on_secondary.discard(unit)

    def _check_read(self, moment: Moment) -> None:
        chunk = self._chunk_of[moment.use]
        if moment.phase is Phase.PRE_FORWARD:
            self._check_full([moment.use])
        if moment.phase is Phase.RECOMPUTE:  # those before it wait for their backward
            self._check_full(chunk[: chunk.index(moment.use) + 1])
        is_recomputed_first = len(chunk) > 1 and moment.use == chunk[-1]
        if moment.phase is Phase.PRE_BACKWARD and self._uses[moment.use].needs_weights_in_backward and not is_recomputed_first:
            self._check_full([moment.use])

    def _check_full(self, uses: list[int]) -> None:
        assert {unit for index in (*uses, *self._outer) for unit in self._uses[index].units} <= self._full

    def weights_changed(self) -> None:
        """All rungs above the main weights are stale."""
        self._on_secondary.clear()
        self._climbing.clear()
        self._full.clear()
