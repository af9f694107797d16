from __future__ import annotations

import math

import pytest
import torch
from harness.small_engine import ROWS, Job, ModelShape, Rank, initial_values
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.zero.pieces import Piece, owned_pieces, parameters, resting_pieces

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
