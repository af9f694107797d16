"""Any division of any parameter into pieces can be read as any other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from harness.source_places import places_of
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.checkpoint.manifest import ELEMENT_BYTES, StoredPiece
from megatron_zpp.checkpoint.reshard import ByteRange, MissingElementsError, PieceIndex, chunk_ranges
from megatron_zpp.checkpoint.source import RowSteps, Source
from megatron_zpp.parallel.division import Stripe
from megatron_zpp.parallel.stripes import column_numel, columns_of

Shape = tuple[int, ...]
Element = tuple[int, int]  # row and column


@st.composite
def cut_parameters(draw: st.DrawFn) -> tuple[Shape, str, list[StoredPiece]]:
    """The shape of a parameter, its element type, and its pieces in several files, in any order. The files also hold other data."""
    shape = draw(st.sampled_from([(), (40,), (3, 2, 5), (7, 6), (2, 30), (30, 1)]))
    element_type = draw(st.sampled_from(sorted(ELEMENT_BYTES)))
    (first, last), rows = columns_of(shape), column_numel(shape)
    pieces = []
    for columns in pairwise(draw(_ends(last, most=3)) if first < last else []):
        for start, stop in pairwise(draw(_ends(rows * (columns[1] - columns[0]), most=8))):
            offsets = {"weight": draw(st.integers(0, 50)) * ELEMENT_BYTES[element_type]}
            file = f"file {draw(st.integers(0, 3))}"
            pieces.append(StoredPiece("p", start, stop, file, offsets, None if columns == columns_of(shape) else columns))
    return shape, element_type, draw(st.permutations(pieces))


def _ends(last: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, last), max_size=most).map(lambda inner: sorted({0, last, *inner}))


@st.composite
def stripes(draw: st.DrawFn, shape: Shape) -> Stripe:
    """Any elements of any columns."""
    first = draw(st.integers(0, columns_of(shape)[1] - 1))
    last = draw(st.integers(first + 1, columns_of(shape)[1]))
    numel = column_numel(shape) * (last - first)
    start = draw(st.integers(0, numel))
    return Stripe((first, last), start, draw(st.integers(start, numel)))


def index_of(shape: Shape, element_type: str, pieces: Sequence[StoredPiece]) -> PieceIndex:
    return PieceIndex(pieces, {"p": shape}, {"weight": element_type})


def elements_of(stripe: Stripe) -> list[Element]:
    """The rows and columns of the elements, in order."""
    first, last = stripe.columns
    return [(element // (last - first), first + element % (last - first)) for element in range(stripe.start, stripe.stop)]


def stripe_of(piece: StoredPiece, shape: Shape) -> Stripe:
    return Stripe(piece.columns or columns_of(shape), piece.start, piece.stop)


@given(cut_parameters(), st.data())
def test_every_wanted_element_comes_from_the_place_where_it_was_stored(
    cut: tuple[Shape, str, list[StoredPiece]], data: st.DataObject
) -> None:
    shape, element_type, pieces = cut
    wanted = data.draw(stripes(shape))
    place_of = {
        element: (piece.file, piece.offsets["weight"] + index * ELEMENT_BYTES[element_type])
        for piece in pieces
        for index, element in enumerate(elements_of(stripe_of(piece, shape)))
    }
    sources = list(index_of(shape, element_type, pieces).sources("p", "weight", wanted))
    found = [(index, (source.file, byte)) for source in sources for byte, index in places_of(source)]
    assert sorted(found) == [(index, place_of[element]) for index, element in enumerate(elements_of(wanted))]
    assert len(sources) <= len(pieces)


@given(cut_parameters(), st.data())
def test_an_element_that_no_piece_holds_is_missed_where_it_is_wanted(
    cut: tuple[Shape, str, list[StoredPiece]], data: st.DataObject
) -> None:
    shape, element_type, pieces = cut
    lost = elements_of(stripe_of(pieces.pop(data.draw(st.integers(0, len(pieces) - 1))), shape))
    wanted = data.draw(stripes(shape))
    index = index_of(shape, element_type, pieces)
    if set(lost) & set(elements_of(wanted)):
        with pytest.raises(MissingElementsError, match="elements .* of p \\(weight\\) are in none of its files"):
            list(index.sources("p", "weight", wanted))
    else:
        assert sum(source.count for source in index.sources("p", "weight", wanted)) == wanted.numel


@given(cut_parameters(), st.data())
def test_pieces_that_leave_a_gap_or_overlap_are_found_with_the_elements(
    cut: tuple[Shape, str, list[StoredPiece]], data: st.DataObject
) -> None:
    shape, element_type, pieces = cut
    assert list(index_of(shape, element_type, pieces).errors()) == []
    chosen = data.draw(st.integers(0, len(pieces) - 1))
    piece = pieces[chosen]
    words = f"elements {piece.start} to {piece.stop}"
    if piece.columns is not None:
        words += f" of columns {piece.columns[0]} to {piece.columns[1]}"
    lost = index_of(shape, element_type, pieces[:chosen] + pieces[chosen + 1 :])
    assert list(lost.errors()) == [f"{words} of p (weight) are in none of its files"]
    doubled = index_of(shape, element_type, [*pieces, replace(piece, file="another")])
    assert list(doubled.errors()) == [f"{words} of p (weight) are in its files twice"]


@given(cut_parameters(), st.data())
def test_pieces_are_without_error_only_if_each_element_is_in_one_of_them(
    cut: tuple[Shape, str, list[StoredPiece]], data: st.DataObject
) -> None:
    shape, element_type, pieces = cut
    chosen = data.draw(st.integers(0, len(pieces) - 1))
    other = data.draw(stripes(shape).filter(lambda stripe: stripe.numel > 0))
    columns = None if other.columns == columns_of(shape) else other.columns
    changed = replace(pieces[chosen], start=other.start, stop=other.stop, columns=columns)
    pieces = [*pieces[:chosen], changed, *pieces[chosen + 1 :]]
    stored = [element for piece in pieces for element in elements_of(stripe_of(piece, shape))]
    errors = list(index_of(shape, element_type, pieces).errors())
    if sorted(stored) != elements_of(Stripe(columns_of(shape), 0, math.prod(shape))):
        assert len(errors) == 1
    else:
        assert all("which overlap" in error for error in errors)


def test_columns_that_overlap_are_an_error_even_if_no_element_is_in_two_pieces() -> None:
    pieces = [
        StoredPiece("p", 0, 4, "file", {"weight": 0}),
        StoredPiece("p", 2, 4, "file", {"weight": 16}, (0, 2)),
        StoredPiece("p", 2, 4, "file", {"weight": 24}, (2, 4)),
    ]
    assert list(index_of((2, 4), "F32", pieces).errors()) == ["pieces of p (weight) have columns 0 to 2 and columns 0 to 4, which overlap"]


def test_a_state_or_a_parameter_without_any_piece_is_a_gap() -> None:
    shapes = {"p": (4,), "q": (2, 3), "empty": (0,), "none": (5, 0), "no rows": (0, 5)}
    index = PieceIndex([StoredPiece("p", 0, 4, "file", {"weight": 0})], shapes, {"weight": "F32", "exp_avg": "F32"})
    assert list(index.errors()) == [
        "elements 0 to 4 of p (exp_avg) are in none of its files",
        "elements 0 to 6 of q (weight) are in none of its files",
        "elements 0 to 6 of q (exp_avg) are in none of its files",
    ]
    for parameter, shape in shapes.items():
        assert list(index.sources(parameter, "weight", Stripe(columns_of(shape), 0, 0))) == []


@pytest.mark.parametrize("case", ["one row each", "one column each", "all alike", "columns that overlap", "every second one"])
def test_thousands_of_pieces_are_checked_in_less_than_quadratic_time(case: str) -> None:
    """Steps that grow with the square of the number would take minutes."""
    count = 20_000
    columns = [(place, place + 1 + (case == "columns that overlap")) for place in range(count)]
    pieces = {
        "one row each": [StoredPiece("p", place * count, (place + 1) * count, "f", {"weight": 0}) for place in range(count)],
        "one column each": [StoredPiece("p", 0, count, "f", {"weight": 0}, one) for one in columns],
        "all alike": [StoredPiece("p", 0, count, "f", {"weight": 0})] * count,
        "columns that overlap": [StoredPiece("p", 0, count, "f", {"weight": 0}, one) for one in columns[:-1]],
        "every second one": [StoredPiece("p", place * count, (place + 1) * count, "f", {"weight": 0}) for place in range(0, count, 2)],
    }[case]
    errors = list(index_of((count, count), "F32", pieces).errors())
    assert len(errors) == (0 if case in ("one row each", "one column each") else 1)


def test_the_pictures() -> None:
    pieces = [StoredPiece("p", 0, 5, "a", {"weight": 80}), StoredPiece("p", 5, 10, "b", {"weight": 120})]
    assert list(index_of((10,), "F32", pieces).sources("p", "weight", Stripe((0, 1), 3, 7))) == [
        Source("a", 92, 0, 2, "F32"),
        Source("b", 120, 2, 2, "F32"),
    ]
    pieces = [StoredPiece("p", 0, 12, "a", {"weight": 80}, (0, 3)), StoredPiece("p", 0, 12, "b", {"weight": 120}, (3, 6))]
    assert list(index_of((4, 6), "F32", pieces).sources("p", "weight", Stripe((1, 5), 3, 14))) == [
        Source("a", 80 + 4 * 4, 1, 6, "F32", RowSteps(2, 0, 3, 4)),
        Source("b", 120 + 4 * 1, 0, 5, "F32", RowSteps(2, 1, 3, 4)),
    ]


def test_elements_without_gaps_are_a_source_without_rows() -> None:
    """What the same world reads is one range of bytes for each piece."""
    piece = StoredPiece("p", 3, 11, "a", {"weight": 80}, (2, 6))
    index = index_of((4, 8), "F32", [piece])
    assert list(index.sources("p", "weight", Stripe((2, 6), 4, 11))) == [Source("a", 84, 0, 7, "F32")]
    assert list(index.sources("p", "weight", Stripe((3, 5), 3, 4))) == [Source("a", 80 + 4 * 3, 0, 1, "F32")]


def test_a_state_or_a_parameter_that_is_not_stored_is_missed() -> None:
    index = index_of((5,), "F32", [StoredPiece("p", 0, 5, "a", {"weight": 80})])
    for parameter, state in (("p", "exp_avg"), ("q", "weight")):
        with pytest.raises(MissingElementsError, match=f"{parameter} \\({state}\\)"):
            list(index.sources(parameter, state, Stripe((0, 1), 0, 1)))


@given(
    ranges=st.lists(st.tuples(st.integers(0, 399), st.integers(0, 60))),
    chunk_bytes=st.integers(1, 50),
    most_chunks=st.integers(1, 5),
)
def test_the_chunks_that_ranges_touch_are_read_once_each_and_no_others(
    ranges: list[tuple[int, int]], chunk_bytes: int, most_chunks: int
) -> None:
    file_bytes = 400
    wanted = sorted((start, min(start + length, file_bytes)) for start, length in ranges)
    touched = {byte // chunk_bytes for start, end in wanted for byte in range(start, end)}
    runs = list(chunk_ranges(wanted, chunk_bytes, file_bytes, most_chunks))
    read = [chunk for run in runs for chunk in range(run.start // chunk_bytes, -(-run.stop // chunk_bytes))]
    assert read == sorted(touched)
    for run in runs:
        assert run.start % chunk_bytes == 0 and (run.stop % chunk_bytes == 0 or run.stop == file_bytes)
        assert 0 < run.stop - run.start <= most_chunks * chunk_bytes


def test_neighbouring_ranges_share_a_run() -> None:
    assert list(chunk_ranges([(0, 10), (10, 25), (90, 95)], 10, 95, 16)) == [ByteRange(0, 30), ByteRange(90, 95)]
