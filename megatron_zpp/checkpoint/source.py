"""Elements that are in one file, and their places in the stripe that is wanted (pure arithmetic, no torch)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge

from megatron_zpp.checkpoint.manifest import ELEMENT_BYTES


@dataclass(frozen=True)
class RowSteps:
    """How elements of some columns are apart, where others lie between their rows.

    width: elements of a full row. lead: how many the first row lacks at its start. stored, wanted: elements from the start of a row to that
    of the next, in the file and in the wanted stripe.
    """

    width: int
    lead: int
    stored: int
    wanted: int


@dataclass(frozen=True)
class Block:
    """`rows` times `width` elements: the first is at byte `offset` of the file, and goes to element `first` of the wanted stripe."""

    offset: int
    first: int
    rows: int
    width: int


@dataclass(frozen=True)
class Source:
    """`count` elements, the first at byte `offset` of `file`. It goes to element `first` of the wanted stripe.

    rows: None if the elements are without gaps, both in the file and in the wanted stripe.
    """

    file: str
    offset: int
    first: int
    count: int
    element_type: str
    rows: RowSteps | None = None

    @property
    def end(self) -> int:
        """The byte after the last one."""
        count = self.count if self.rows is None else _place(self.count - 1, self.rows, self.rows.stored) + 1
        return self.offset + count * ELEMENT_BYTES[self.element_type]

    def byte_ranges(self) -> Iterator[tuple[int, int]]:
        """The bytes of each row in the file, in order."""
        if self.rows is None:
            yield self.offset, self.end
            return
        element_bytes = ELEMENT_BYTES[self.element_type]
        start = 0
        while start < self.count:
            stop = min(self.count, start + self.rows.width - (self.rows.lead if start == 0 else 0))
            begin = self.offset + _place(start, self.rows, self.rows.stored) * element_bytes
            yield begin, begin + (stop - start) * element_bytes
            start = stop

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The elements in bytes [start, stop) of the file, which hold whole elements, as at most three blocks."""
        element_bytes = ELEMENT_BYTES[self.element_type]
        if self.rows is None:
            begin, end = max(start, self.offset), min(stop, self.offset + self.count * element_bytes)
            if begin < end:
                yield Block(begin, self.first + (begin - self.offset) // element_bytes, 1, (end - begin) // element_bytes)
            return
        width, lead = self.rows.width, self.rows.lead
        begin, end = (_count_before((place - self.offset) // element_bytes, self.rows, self.count) for place in (start, stop))
        place, end = begin + lead, end + lead
        while place < end:
            rows = 1 if place % width else max(1, (end - place) // width)
            count = min(end - place, width - place % width)
            stored, wanted = (_place(place - lead, self.rows, step) for step in (self.rows.stored, self.rows.wanted))
            yield Block(self.offset + stored * element_bytes, self.first + wanted, rows, count)
            place += rows * count


def _count_before(place: int, rows: RowSteps, count: int) -> int:
    """How many of `count` elements are stored before place `place`, counted in elements of the file from the first one."""
    row, column = divmod(place + rows.lead, rows.stored)
    return min(max(row * rows.width + min(column, rows.width) - rows.lead, 0), count)


def _place(element: int, rows: RowSteps, step: int) -> int:
    """The place of an element, counted from the first one, if rows begin every `step` elements."""
    row, column = divmod(element + rows.lead, rows.width)
    return row * step + column - rows.lead


def byte_ranges(sources: Iterable[Source], least_gap: int) -> Iterator[tuple[int, int]]:
    """The ranges of bytes of a file that hold the elements of the sources, sorted by start.

    sources: sorted by offset. Gaps of fewer than `least_gap` bytes between the rows of a source may be inside a range.
    """
    compact: list[tuple[int, int]] = []
    sparse: list[Source] = []
    for source in sources:
        if source.rows is None or (source.rows.stored - source.rows.width) * ELEMENT_BYTES[source.element_type] < least_gap:
            compact.append((source.offset, source.end))
        else:
            sparse.append(source)
    return merge(compact, *(source.byte_ranges() for source in sparse))
