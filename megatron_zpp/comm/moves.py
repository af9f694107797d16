"""Chooses what the thread of the lanes does next: one rule, for the thread itself and for the time model that predicts it (no torch).

A hop is submitted, prepared, launched, crossed (its collective has ended) and landed. Each of these has a time, which is NEVER until
it is known. The thread notes each event when it happens, so known times lie in the past. The time model computes them in advance: as soon
as a hop is launched, it knows the later time at which the hop will have crossed.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from megatron_zpp.parallel.topology import MOST_CROSSING

NEVER = math.inf


class Move(enum.IntEnum):
    """The moves of a hop. Of those that can start at the same time, the first in this order is made."""

    LAUNCH = 0  # keeps a link busy
    LAND = 1  # computation may wait for it
    PREPARE = 2  # is needed later


@dataclass(eq=False, kw_only=True)
class Times:
    """The times of one hop."""

    submitted: float = 0.0
    prepared: float = NEVER
    launched: float = NEVER
    crossed: float = NEVER
    landed: float = NEVER

    @property
    def has_landed(self) -> bool:
        return self.landed < NEVER


class TimedHop(Protocol):
    """A hop with its times. after: the hop that must land before this one is prepared."""

    submitted: float
    prepared: float
    launched: float
    crossed: float
    landed: float

    @property
    def after(self) -> TimedHop | None: ...


HopType = TypeVar("HopType", bound=TimedHop)


@dataclass(frozen=True)
class NextMove(Generic[HopType]):
    """A move of a hop; start: the time from which it can be made."""

    start: float
    move: Move
    hop: HopType


def first_move(lanes: Iterable[deque[HopType]], free_from: float) -> NextMove[HopType] | None:
    """The next move of a thread that is free from `free_from` on; None if no move can start at a known time.

    lanes: the hops of each lane that have not landed, in the order of submission. Only the first MOST_CROSSING + 1 of each lane are looked
    at.
    """
    moves = (move for lane in lanes for move in _moves(lane, free_from))
    return min(moves, key=lambda found: (found.start, found.move), default=None)


def _moves(lane: deque[HopType], free_from: float) -> Iterator[NextMove[HopType]]:
    first = list(islice(lane, MOST_CROSSING + 1))
    waiting = next((hop for hop in first if hop.launched == NEVER), None)
    if waiting is not None:
        yield from _possible(max(waiting.prepared, _place_free(first[: first.index(waiting)])), free_from, Move.LAUNCH, waiting)
    if first:
        yield from _possible(first[0].crossed, free_from, Move.LAND, first[0])
    unprepared = next((hop for hop in first if hop.prepared == NEVER), None)
    if unprepared is not None:
        ready = unprepared.submitted if unprepared.after is None else max(unprepared.submitted, unprepared.after.landed)
        yield from _possible(ready, free_from, Move.PREPARE, unprepared)


def _possible(ready: float, free_from: float, move: Move, hop: HopType) -> Iterator[NextMove[HopType]]:
    if ready < NEVER:
        yield NextMove(max(ready, free_from), move, hop)


def _place_free(launched: list[HopType]) -> float:
    """The time from which fewer than MOST_CROSSING of the lane's collectives are under way."""
    if len(launched) < MOST_CROSSING:
        return 0.0
    return sorted(hop.crossed for hop in launched)[-MOST_CROSSING]
