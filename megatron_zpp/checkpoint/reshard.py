"""Maps the pieces stored by one world to the stripes needed by another (pure arithmetic, no torch).

Example: two ranks have stored a parameter of ten elements, and the middle one of three ranks needs elements 3 to 7:

    stored    a a a a a | b b b b b          file a, file b
    wanted    . . . w w w w . . .            2 elements from a, then 2 from b

Two tensor ranks have stored three columns each of a matrix [4, 6], and a rank needs elements 3 to 14 of its columns 1 to 5:

    stored    a a a b b b      wanted    . . . . w .      from a 6 elements in 3 rows of 2; each row goes
              a a a b b b                . w w w w .      to places that are 4 apart, and is stored 3 apart
              a a a b b b                . w w w w .
              a a a b b b                . w w . . .      from b 5 elements in rows of 2, the first of which lacks one
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice, pairwise

from megatron_zpp.checkpoint.manifest import ELEMENT_BYTES, StoredPiece
from megatron_zpp.checkpoint.source import RowSteps, Source
from megatron_zpp.parallel.division import Stripe
from megatron_zpp.parallel.stripes import Columns, column_numel, columns_of, converted, words_of
from megatron_zpp.zero.policy import WEIGHT


@dataclass(frozen=True)
class ByteRange:
    """Bytes [start, stop) of a file. Both are chunk boundaries, except that stop may be the end of the file."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class MissingElementsError(LookupError):
    """Elements of one state of a parameter are in no piece. elements: which, in words."""

    def __init__(self, parameter: str, state: str, elements: str) -> None:
        super().__init__(f"{elements} of {parameter} ({state}) are in none of its files")


@dataclass(frozen=True)
class _Group:
    """The pieces of one state of a parameter that have the same columns, sorted by start. starts: of each piece."""

    columns: Columns
    pieces: Sequence[StoredPiece] = ()
    starts: Sequence[int] = ()

    def parts(self, stripe: Stripe) -> Iterator[tuple[Stripe, StoredPiece | None]]:
        """The parts of a stripe, in order, each with the piece that holds it; None if no piece does.

        The group must have all columns of the stripe.
        """
        position = stripe.start
        while position < stripe.stop:
            element = converted(position, stripe.columns, self.columns)
            place = bisect_right(self.starts, element) - 1
            piece = self.pieces[place] if place >= 0 and self.pieces[place].stop > element else None
            end = piece.stop if piece is not None else next(iter(self.starts[place + 1 : place + 2]), None)
            stop = stripe.stop if end is None else min(stripe.stop, converted(end, self.columns, stripe.columns))
            yield Stripe(stripe.columns, position, stop), piece
            position = stop

    def faults(self, numel: int) -> Iterator[tuple[Stripe, bool]]:
        """The ranges of the first `numel` elements that no piece holds (False) or that two pieces hold (True)."""
        position = 0
        for piece in self.pieces:
            if piece.start > position:
                yield Stripe(self.columns, position, piece.start), False
            elif piece.start < position:
                yield Stripe(self.columns, piece.start, min(position, piece.stop)), True
            position = max(position, piece.stop)
        if position < numel:
            yield Stripe(self.columns, position, numel), False


class PieceIndex:
    """Finds stripes in stored pieces.

    In each state of a parameter, two pieces have the same columns or columns that do not overlap, and no element is in both: see `errors`.
    shapes: of the whole parameters. states: the element type of each state. frozen: parameters that have a weight alone.
    """

    def __init__(
        self,
        pieces: Iterable[StoredPiece],
        shapes: Mapping[str, tuple[int, ...]],
        states: Mapping[str, str],
        frozen: AbstractSet[str] = frozenset(),
    ) -> None:
        self._shapes = shapes
        self._frozen = frozen
        self._states = states
        all_columns = {parameter: columns_of(shape) for parameter, shape in shapes.items()}
        found: dict[tuple[str, str], dict[Columns, list[StoredPiece]]] = defaultdict(lambda: defaultdict(list))
        for piece in sorted(pieces, key=lambda piece: piece.start):
            columns = piece.columns or all_columns[piece.parameter]
            for state in piece.offsets:
                found[piece.parameter, state][columns].append(piece)
        self._groups = {
            key: [_Group(columns, pieces, [piece.start for piece in pieces]) for columns, pieces in sorted(by_columns.items())]
            for key, by_columns in found.items()
        }

    def errors(self) -> Iterator[str]:
        """For each state of each parameter the first elements that no piece holds or that two pieces hold."""
        for parameter, shape in self._shapes.items():
            for state in [WEIGHT] if parameter in self._frozen else self._states:
                yield from islice(self._errors_of(parameter, state, shape), 1)

    def _errors_of(self, parameter: str, state: str, shape: tuple[int, ...]) -> Iterator[str]:
        groups = self._groups.get((parameter, state), [])
        for one, other in pairwise(groups):
            if other.columns[0] < one.columns[1]:
                yield f"pieces of {parameter} ({state}) have columns {_words(one)} and columns {_words(other)}, which overlap"
        for group in _with_columns(groups, columns_of(shape)):
            for stripe, is_twice in group.faults(column_numel(shape) * (group.columns[1] - group.columns[0])):
                if is_twice:
                    yield f"{words_of(stripe, shape)} of {parameter} ({state}) are in its files twice"
                else:
                    yield str(MissingElementsError(parameter, state, words_of(stripe, shape)))

    def sources(self, parameter: str, state: str, stripe: Stripe) -> Iterator[Source]:
        """The sources of the elements of a stripe. Raises MissingElementsError if one of them is in no piece."""
        for group in _with_columns(self._groups.get((parameter, state), []), stripe.columns):
            for part, piece in group.parts(_narrowed(stripe, group.columns)):
                if piece is None:
                    raise MissingElementsError(parameter, state, words_of(part, self._shapes.get(parameter, ())))
                yield _source(part, stripe, group, piece, piece.offsets[state], self._states[state])


def _with_columns(groups: Sequence[_Group], columns: Columns) -> Iterator[_Group]:
    """The groups that have some of the columns, in order; groups without pieces stand for columns that none has."""
    position, last = columns
    place = bisect_right(groups, position, key=lambda group: group.columns[0]) - 1
    for group in islice(groups, max(place, 0), None):
        if group.columns[0] >= last:
            break
        if group.columns[1] <= position:
            continue
        if group.columns[0] > position:
            yield _Group((position, group.columns[0]))
        yield group
        position = group.columns[1]
    if position < last:
        yield _Group((position, last))


def _narrowed(stripe: Stripe, columns: Columns) -> Stripe:
    """What a stripe has of some columns."""
    first, last = max(stripe.columns[0], columns[0]), min(stripe.columns[1], columns[1])
    start, stop = (converted(element, stripe.columns, (first, last)) for element in (stripe.start, stripe.stop))
    return Stripe((first, last), start, stop)


def _words(group: _Group) -> str:
    return f"{group.columns[0]} to {group.columns[1]}"


def _source(part: Stripe, wanted: Stripe, group: _Group, piece: StoredPiece, offset: int, element_type: str) -> Source:
    """The source of a part of the wanted stripe, all of which is in the piece. offset: of the piece's first element."""
    stored_place = converted(part.start, part.columns, group.columns) - piece.start
    wanted_place = converted(part.start, part.columns, wanted.columns) - wanted.start
    rows = None if part.columns == group.columns == wanted.columns else _row_steps(part, wanted, group)
    return Source(piece.file, offset + stored_place * ELEMENT_BYTES[element_type], wanted_place, part.numel, element_type, rows)


def _row_steps(part: Stripe, wanted: Stripe, group: _Group) -> RowSteps | None:
    width, stored, steps = (columns[1] - columns[0] for columns in (part.columns, group.columns, wanted.columns))
    lead = part.start % width
    return None if lead + part.numel <= width else RowSteps(width, lead, stored, steps)


def chunk_ranges(ranges: Iterable[tuple[int, int]], chunk_bytes: int, file_bytes: int, most_chunks: int) -> Iterator[ByteRange]:
    """The chunks that overlap the byte ranges, each once and in order, in ranges of at most `most_chunks`.

    ranges: (start, end) within the file, sorted by start.
    """
    first = stop = 0  # chunks [first, stop) are not yielded yet
    for start, end in ranges:
        if start >= end:
            continue
        begin, beyond = start // chunk_bytes, -(-end // chunk_bytes)
        if begin > stop:
            yield from _chunk_ranges(first, stop, chunk_bytes, file_bytes, most_chunks)
            first = stop = begin
        stop = max(stop, beyond)
    yield from _chunk_ranges(first, stop, chunk_bytes, file_bytes, most_chunks)


def _chunk_ranges(first: int, stop: int, chunk_bytes: int, file_bytes: int, most_chunks: int) -> Iterator[ByteRange]:
    for chunk in range(first, stop, most_chunks):
        yield ByteRange(chunk * chunk_bytes, min(min(chunk + most_chunks, stop) * chunk_bytes, file_bytes))
