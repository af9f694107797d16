"""Chooses what the thread of the lanes does next: one rule, for the thread itself and for the clock of a plan.

A hop is submitted, prepared, launched, crossed (its collective has ended) and landed. Each of these has a time, which is NEVER until
it is known. The thread notes each event when it happens, so known times lie in the past. The clock computes them in advance: as soon
as a hop is launched, it knows the later time at which the hop will have crossed.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable
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
    at. The thread of the lanes asks several times per hop, hence the plain loops.
    """
    start, first, found = NEVER, Move.PREPARE, None
    for lane in lanes:
        if not lane:
            continue
        for ready, move, hop in _moves(lane):
            begin = ready if ready > free_from else free_from
            if begin < start or (begin == start and move < first and found is not None):
                start, first, found = begin, move, hop
    return None if found is None else NextMove(start, first, found)


def _moves(lane: deque[HopType]) -> list[tuple[float, Move, HopType]]:
    """For each kind of move, the hop of the lane that it is the turn of, and the time from which it can be made, which may be NEVER."""
    moves = [(lane[0].crossed, Move.LAND, lane[0])]
    crossing: list[float] = []
    is_next_found = False  # the next hop to launch
    for hop in islice(lane, MOST_CROSSING + 1):
        if hop.launched < NEVER:
            crossing.append(hop.crossed)
            continue
        if not is_next_found:
            is_next_found = True
            moves.append((max(hop.prepared, _place_free(crossing)), Move.LAUNCH, hop))
        if hop.prepared == NEVER:
            moves.append((hop.submitted if hop.after is None else max(hop.submitted, hop.after.landed), Move.PREPARE, hop))
            break
    return moves


def _place_free(crossing: list[float]) -> float:
    """The time from which fewer than MOST_CROSSING of the lane's collectives are under way; crossing: when those launched have crossed."""
    if len(crossing) < MOST_CROSSING:
        return 0.0
    return sorted(crossing)[-MOST_CROSSING]
