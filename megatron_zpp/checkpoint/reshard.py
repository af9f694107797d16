"""Maps the pieces stored by one world size to the ranges needed by another (pure arithmetic, no torch).

Example: two ranks have stored a parameter of ten elements, and the middle one of three ranks needs elements 3 to 7:

    stored    a a a a a | b b b b b          file a, file b
    wanted    . . . w w w w . . .            2 elements from a, then 2 from b
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_zpp.checkpoint.manifest import ELEMENT_BYTES, StoredPiece


@dataclass(frozen=True)
class Source:
    """`count` elements that begin at byte `offset` of `file`. They go to element `first` of the wanted range."""

    file: str
    offset: int
    first: int
    count: int

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.offset + self.count * ELEMENT_BYTES


@dataclass(frozen=True)
class ByteRun:
    """Bytes [start, stop) of a file. Both are chunk boundaries, except that stop may be the end of the file."""

    start: int
    stop: int


class MissingElementsError(LookupError):
    """Elements [start, stop) of one state of a parameter are in no piece."""

    def __init__(self, parameter: str, state: str, start: int, stop: int) -> None:
        super().__init__(f"elements {start} to {stop} of {parameter} ({state}) are in none of its files")


class PieceIndex:
    """Finds ranges in stored pieces. The pieces of one state of one parameter must not overlap, see `errors`."""

    def __init__(self, pieces: Iterable[StoredPiece]) -> None:
        self._pieces: dict[tuple[str, str], list[StoredPiece]] = defaultdict(list)
        for piece in sorted(pieces, key=lambda piece: piece.start):
            for state in piece.offsets:
                self._pieces[piece.parameter, state].append(piece)
        self._starts = {key: [piece.start for piece in pieces] for key, pieces in self._pieces.items()}

    def errors(self, numels: Mapping[str, int], states: Iterable[str]) -> Iterator[str]:
        """For each state of each parameter the first range of elements that no piece holds, or that two pieces hold.

        numels: elements of each parameter.
        """
        for parameter, numel, state in ((*item, state) for item in numels.items() for state in states):
            position = 0
            for piece in (*self._pieces.get((parameter, state), ()), StoredPiece(parameter, numel, numel, "", {})):
                if piece.start > position:
                    yield str(MissingElementsError(parameter, state, position, piece.start))
                    break
                if piece.start < position:
                    yield f"elements {piece.start} to {min(position, piece.stop)} of {parameter} ({state}) are in its files twice"
                    break
                position = piece.stop

    def sources(self, parameter: str, state: str, start: int, stop: int) -> Iterator[Source]:
        """The sources of elements [start, stop), in order. Raises MissingElementsError if one of them is in no piece."""
        pieces, starts = self._pieces.get((parameter, state), []), self._starts.get((parameter, state), [])
        position = start
        while position < stop:
            place = bisect_right(starts, position) - 1
            if place < 0 or pieces[place].stop <= position:
                end = min(stop, starts[place + 1]) if place + 1 < len(starts) else stop
                raise MissingElementsError(parameter, state, position, end)
            piece = pieces[place]
            count = min(stop, piece.stop) - position
            yield Source(piece.file, piece.offsets[state] + (position - piece.start) * ELEMENT_BYTES, position - start, count)
            position += count


def chunk_runs(ranges: Sequence[tuple[int, int]], chunk_bytes: int, file_bytes: int, most_chunks: int) -> Iterator[ByteRun]:
    """The chunks that overlap the byte ranges, each once and in order, in runs of at most `most_chunks`.

    ranges: (start, end) within the file, sorted by start.
    """
    first = stop = 0  # chunks [first, stop) are not yielded yet
    for start, end in ranges:
        if start >= end:
            continue
        begin, beyond = start // chunk_bytes, -(-end // chunk_bytes)
        if begin > stop:
            yield from _runs(first, stop, chunk_bytes, file_bytes, most_chunks)
            first = stop = begin
        stop = max(stop, beyond)
    yield from _runs(first, stop, chunk_bytes, file_bytes, most_chunks)


def _runs(first: int, stop: int, chunk_bytes: int, file_bytes: int, most_chunks: int) -> Iterator[ByteRun]:
    for chunk in range(first, stop, most_chunks):
        yield ByteRun(chunk * chunk_bytes, min(min(chunk + most_chunks, stop) * chunk_bytes, file_bytes))
