from __future__ import annotations

import pytest
import torch
from harness.small_engine import LEARNING_RATE, ROWS, Job, ModelShape, Rank, train_plainly
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("piece_numel", [32, 96, 256])
def test_torchs_fused_adamw_gives_the_same_bits_for_pieces_of_whole_blocks(piece_numel: int) -> None:
    """Stages differ in how many slices one update spans; pieces that are not a multiple of the vector width would get other bits."""
    whole, cut = (_fused_updates(length) for length in (2304, piece_numel))
    assert torch.equal(whole, cut)


def _fused_updates(piece_numel: int) -> torch.Tensor:
    start = torch.randn(2304, generator=torch.Generator().manual_seed(1))
    pieces = [torch.nn.Parameter(piece.clone()) for piece in start.split(piece_numel)]
    optimizer = torch.optim.AdamW(pieces, lr=1e-2, weight_decay=0.01, fused=True)
    for step in range(5):
        gradient = torch.randn(2304, generator=torch.Generator().manual_seed(10 + step))
        for piece, part in zip(pieces, gradient.split(piece_numel), strict=True):
            piece.grad = part.clone()
        optimizer.step()
    return torch.cat([piece.detach() for piece in pieces])


@pytest.mark.parametrize("row", list(ROWS))
def test_parameters_of_one_dimension_do_not_decay(row: str) -> None:
    """With a gradient of zero AdamW only decays: each step by the factor 1 - lr * weight_decay."""

    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(ROWS[row]), backend)
        for _ in range(3):
            rank.backward(rank.loss(0) * 0.0)
            rank.engine.step(LEARNING_RATE)
        rank.engine.close()
        decayed = (1 - LEARNING_RATE * 0.01) ** 3
        for unit in rank.engine.units:
            for segment in unit.layout.segments(unit.first_slice, unit.slices):
                first = segment.spec.initial_values(segment.start, segment.stop)
                now = unit.main_weight[segment.offset : segment.offset + first.numel()]
                torch.testing.assert_close(now, first * (decayed if len(segment.spec.shape) > 1 else 1.0), rtol=1e-6, atol=0.0)

    run_world((2, 2), program)


@pytest.mark.parametrize("row", list(ROWS))
def test_steps_counts_updates_and_can_be_set_for_a_resume(row: str) -> None:
    def program(backend: VirtualBackend) -> tuple[int, float]:
        rank = Rank(Job(ROWS[row]), backend)
        rank.engine.optimizer.steps = 10_000_000  # bias corrections are 1 by then
        loss = rank.loss(0)
        rank.backward(loss)
        rank.engine.finish_gradients()
        gradient = rank.engine.gradients[0].for_optimizer.blocks.clone()
        moment = rank.engine.optimizer.moments[0]["exp_avg"]
        rank.engine.step(LEARNING_RATE)
        rank.engine.close()
        ratio = (moment[: gradient.numel()] / gradient.flatten())[gradient.flatten() != 0]
        return rank.engine.optimizer.steps, float(ratio.max() - ratio.min()) if ratio.numel() else 0.0

    for steps, spread in run_world((2, 2), program):
        assert steps == 10_000_001
        assert spread < 1e-6


def test_learning_rates_of_single_steps_are_used() -> None:
    def program(backend: VirtualBackend) -> bool:
        rank = Rank(Job(), backend)
        before = [unit.main_weight.clone() for unit in rank.engine.units]
        rank.backward(rank.loss(0))
        rank.engine.step(0.0)
        rank.engine.close()
        return all(torch.equal(unit.main_weight, weight) for unit, weight in zip(rank.engine.units, before, strict=True))

    assert all(run_world((1, 2), program))


def test_the_plain_loop_of_these_tests_learns() -> None:
    history, _ = train_plainly(Job(steps=8, shape=ModelShape()))
    assert history[-1][0] < history[0][0]
