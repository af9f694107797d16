"""Any division of any parameter into pieces can be read as any other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.checkpoint.manifest import ELEMENT_BYTES, StoredPiece
from megatron_zpp.checkpoint.reshard import ByteRun, MissingElementsError, PieceIndex, Source, chunk_runs


@st.composite
def cut_parameters(draw: st.DrawFn) -> tuple[int, list[StoredPiece]]:
    """The size of a parameter, and its pieces in several files, in any order. The files also hold other data."""
    numel = draw(st.integers(1, 200))
    inner = draw(st.lists(st.integers(0, numel), max_size=12))
    ends = sorted({0, numel, *inner})
    pieces = [
        StoredPiece("p", start, stop, f"file {draw(st.integers(0, 3))}", {"weight": draw(st.integers(0, 50)) * ELEMENT_BYTES})
        for start, stop in pairwise(ends)
    ]
    return numel, draw(st.permutations(pieces))


@given(cut_parameters(), st.data())
def test_every_wanted_element_comes_from_the_place_where_it_was_stored(cut: tuple[int, list[StoredPiece]], data: st.DataObject) -> None:
    numel, pieces = cut
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    place_of = {
        element: (piece.file, piece.offsets["weight"] + (element - piece.start) * ELEMENT_BYTES)
        for piece in pieces
        for element in range(piece.start, piece.stop)
    }
    found = {}
    for source in PieceIndex(pieces).sources("p", "weight", start, stop):
        for index in range(source.count):
            found[start + source.first + index] = (source.file, source.offset + index * ELEMENT_BYTES)
    assert found == {element: place_of[element] for element in range(start, stop)}


@given(cut_parameters(), st.data())
def test_an_element_that_no_piece_holds_is_missed_where_it_is_wanted(cut: tuple[int, list[StoredPiece]], data: st.DataObject) -> None:
    numel, pieces = cut
    lost = pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    index = PieceIndex(pieces)
    if max(start, lost.start) < min(stop, lost.stop):
        first, last = max(start, lost.start), min(stop, lost.stop)
        with pytest.raises(MissingElementsError, match=f"elements {first} to {last} of p \\(weight\\)"):
            list(index.sources("p", "weight", start, stop))
    else:
        assert sum(source.count for source in index.sources("p", "weight", start, stop)) == stop - start


@given(cut_parameters(), st.data())
def test_pieces_that_leave_a_gap_or_overlap_are_found_with_the_range(cut: tuple[int, list[StoredPiece]], data: st.DataObject) -> None:
    numel, pieces = cut
    assert list(PieceIndex(pieces).errors({"p": numel}, ["weight"])) == []
    chosen = data.draw(st.integers(0, len(pieces) - 1))
    piece = pieces[chosen]
    lost = PieceIndex(pieces[:chosen] + pieces[chosen + 1 :])
    gap = f"elements {piece.start} to {piece.stop} of p (weight) are in none of its files"
    assert list(lost.errors({"p": numel}, ["weight"])) == [gap]
    doubled = PieceIndex([*pieces, replace(piece, file="another")])
    assert list(doubled.errors({"p": numel}, ["weight"])) == [
        f"elements {piece.start} to {piece.stop} of p (weight) are in its files twice"
    ]


def test_a_state_or_a_parameter_without_any_piece_is_a_gap() -> None:
    index = PieceIndex([StoredPiece("p", 0, 4, "file", {"weight": 0})])
    assert list(index.errors({"p": 4, "q": 2, "empty": 0}, ["weight", "exp_avg"])) == [
        "elements 0 to 4 of p (exp_avg) are in none of its files",
        "elements 0 to 2 of q (weight) are in none of its files",
        "elements 0 to 2 of q (exp_avg) are in none of its files",
    ]


def test_the_picture() -> None:
    pieces = [StoredPiece("p", 0, 5, "a", {"weight": 80}), StoredPiece("p", 5, 10, "b", {"weight": 120})]
    assert list(PieceIndex(pieces).sources("p", "weight", 3, 7)) == [Source("a", 92, 0, 2), Source("b", 120, 2, 2)]


def test_a_state_or_a_parameter_that_is_not_stored_is_missed() -> None:
    index = PieceIndex([StoredPiece("p", 0, 5, "a", {"weight": 80})])
    for parameter, state in (("p", "exp_avg"), ("q", "weight")):
        with pytest.raises(MissingElementsError, match=f"{parameter} \\({state}\\)"):
            list(index.sources(parameter, state, 0, 1))


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
    runs = list(chunk_runs(wanted, chunk_bytes, file_bytes, most_chunks))
    read = [chunk for run in runs for chunk in range(run.start // chunk_bytes, -(-run.stop // chunk_bytes))]
    assert read == sorted(touched)
    for run in runs:
        assert run.start % chunk_bytes == 0 and (run.stop % chunk_bytes == 0 or run.stop == file_bytes)
        assert 0 < run.stop - run.start <= most_chunks * chunk_bytes


def test_neighbouring_ranges_share_a_run() -> None:
    assert list(chunk_runs([(0, 10), (10, 25), (90, 95)], 10, 95, 16)) == [ByteRun(0, 30), ByteRun(90, 95)]
