from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from harness.small_engine import ROWS, Job, ModelShape, Rank, initial_values
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.parallel.division import Division, HeldRange
from megatron_zpp.zero.layout import FlatLayout, Segment
from megatron_zpp.zero.pieces import Piece, owned_pieces, parameters, pieces_of, resting_pieces

pytestmark = pytest.mark.virtual

STATES = {"weight", "exp_avg", "exp_avg_sq"}


def _pieces(backend: VirtualBackend, row: str) -> tuple[list[Piece], list[Piece], dict[str, tuple[int, ...]]]:
    rank = Rank(Job(ROWS[row], shape=ModelShape(is_tied=False)), backend)
    shapes = {placed.spec.name: placed.spec.shape for placed in parameters(rank.engine)}
    return list(owned_pieces(rank.engine)), list(resting_pieces(rank.engine)), shapes


@pytest.mark.parametrize("row", list(ROWS))
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 2)], ids=str)
def test_the_owned_pieces_of_all_ranks_are_every_element_of_every_state_once(shape: tuple[int, int], row: str) -> None:
    results = run_world(shape, lambda backend: _pieces(backend, row))
    shapes = results[0][2]
    seen = {(name, state): torch.zeros(math.prod(dims), dtype=torch.int) for name, dims in shapes.items() for state in STATES}
    for owned, _, _ in results:
        for piece in owned:
            seen[piece.parameter, piece.state][piece.start : piece.stop] += 1
    assert all(bool((counts == 1).all()) for counts in seen.values())


@pytest.mark.parametrize("row", list(ROWS))
def test_a_piece_holds_the_values_of_its_range_as_a_view_of_the_state_itself(row: str) -> None:
    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(ROWS[row]), backend)
        places = {unit.main_weight.untyped_storage().data_ptr() for unit in rank.engine.units}
        shapes = {placed.spec.name: placed.spec.shape for placed in parameters(rank.engine)}
        for piece in (*owned_pieces(rank.engine), *resting_pieces(rank.engine)):
            numel, ndim = math.prod(shapes[piece.parameter]), len(shapes[piece.parameter])
            if piece.state == "weight":
                assert torch.equal(piece.values, initial_values(piece.parameter, numel, ndim, piece.start, piece.stop))
                assert piece.values.untyped_storage().data_ptr() in places
            else:
                assert not piece.values.any() and piece.values.numel() == piece.stop - piece.start

    run_world((2, 2), program)


def test_what_rests_on_a_rank_is_what_it_owns_unless_the_optimizer_is_on_the_full_rung() -> None:
    for row in ROWS:
        for owned, resting, shapes in run_world((2, 2), lambda backend: _pieces(backend, row)):  # noqa: B023
            elements = sum(piece.stop - piece.start for piece in resting)
            everything = 3 * sum(math.prod(dims) for dims in shapes.values())
            expected = everything if row == "stage 0" else sum(piece.stop - piece.start for piece in owned)
            assert elements == expected


def test_elements_that_another_rank_counts_are_not_owned_but_rest_here(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = FlatLayout.segments

    def segments_with_shared_biases(layout: FlatLayout, first: int = 0, slices: int | None = None) -> Iterator[Segment]:
        for segment in segments(layout, first, slices):
            yield replace(segment, counted=len(segment.spec.shape) > 1)

    monkeypatch.setattr(FlatLayout, "segments", segments_with_shared_biases)
    owned, resting, shapes = run_world((1, 1), lambda backend: _pieces(backend, "stage 3"))[0]
    assert {piece.parameter for piece in owned} == {name for name, shape in shapes.items() if len(shape) > 1}
    assert {piece.parameter for piece in resting} == set(shapes)


def test_a_range_of_a_part_is_one_piece_for_each_run_and_names_columns_only_if_they_are_not_all() -> None:
    def found(division: Division, start: int, stop: int) -> list[tuple[int, int, tuple[int, int] | None, list[float]]]:
        pieces = pieces_of("p", "weight", division, start, torch.arange(float(start), float(stop)))
        return [(piece.start, piece.stop, piece.columns, piece.values.tolist()) for piece in pieces]

    assert found(Division.undivided((3, 4)), 2, 5) == [(2, 5, None, [2, 3, 4])]
    assert found(Division.evenly((3, 4), 1, 2, 1), 1, 4) == [(1, 4, (2, 4), [1, 2, 3])]
    assert found(Division.evenly((6,), 0, 2, 1), 1, 3) == [(4, 6, None, [1, 2])]
    gate_and_value = Division((8, 2), 0, tuple(HeldRange(2 * index, 2 * index + 2, (index % 2,)) for index in range(4)), 1)
    assert found(gate_and_value, 3, 6) == [(7, 8, None, [3]), (12, 14, None, [4, 5])]
