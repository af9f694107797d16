"""The order in which ranks ask for hops. No hop carries a name: ranks that ask in different orders would take values of other units."""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Sequence
from itertools import zip_longest

from megatron_zpp.parallel.topology import LANES, Direction, Lane

REMEMBERED = 256  # hops of each lane, for an error


class HopOrder:
    """The hops that this rank has asked for on each lane since the ranks last compared them (no torch)."""

    def __init__(self) -> None:
        self._counts: list[int]
        self._checksums: list[int]
        self._latest: list[deque[str]]
        self.begin()

    def begin(self) -> None:
        """Forgets all hops. Every rank must call it at the same point."""
        self._counts = [0] * len(LANES)
        self._checksums = [0] * len(LANES)
        self._latest = [deque(maxlen=REMEMBERED) for _ in LANES]

    def add(self, lane: Lane, unit: str) -> None:
        """A hop of this unit is submitted to a lane on which other ranks take part."""
        index = LANES.index(lane)
        self._counts[index] += 1
        self._checksums[index] = zlib.crc32(f"{unit}\n".encode(), self._checksums[index])
        self._latest[index].append(unit)

    @property
    def checksum(self) -> int:
        """32 bits, the same on every rank if all have asked for the same hops in the same order on each lane."""
        return zlib.crc32(repr((self._counts, self._checksums)).encode())

    def as_text(self) -> str:
        """What `first_difference` reads."""
        return json.dumps([[count, *latest] for count, latest in zip(self._counts, self._latest, strict=True)])


def first_difference(texts: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """Says which hop two ranks have asked for differently. texts: `HopOrder.as_text` of every rank; they are not all the same.

    ranks: what each of them is called; by default its number.
    """
    records = [json.loads(text) for text in texts]
    differing = next(rank for rank, record in enumerate(records) if record != records[0])
    here, other = (ranks[rank] if ranks else rank for rank in (0, differing))
    who = f"ranks {here} and {other} made different calls"
    for lane, (count, *first), (other_count, *second) in zip(LANES, records[0], records[differing], strict=True):
        start = max(count - len(first), other_count - len(second))  # the place of the first hop that both remember
        if start > min(count, other_count):
            return f"{who}: {count} and {other_count} messages over the {lane.link.value} link since the last step"
        both = zip_longest(first[start - (count - len(first)) :], second[start - (other_count - len(second)) :])
        for place, (own, others) in enumerate(both, start):
            if own != others:
                return (
                    f"{who}: after {place} messages over the {lane.link.value} link since the last step, rank {here} asked for "
                    f"{values_in_words(lane, own)} and rank {other} for {values_in_words(lane, others)}"
                )
    return f"{who}, more than {REMEMBERED} messages before the last one"


def values_in_words(lane: Lane, unit: str | None) -> str:
    """What a hop of this unit carries; None stands for no hop."""
    if unit is None:
        return "nothing more"
    return f"{'the weights' if lane.direction is Direction.CLIMB else 'the mean gradient'} of unit {unit}"
