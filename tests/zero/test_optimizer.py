from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from harness.small_engine import LEARNING_RATE, ROWS, Job, ModelShape, Rank, SmallModel, train_plainly
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.parallel.specs import UnitSpec
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.adam import AdamGroup, AdamOptions, make_adam
from megatron_zpp.zero.optimizer import MOMENTS

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


@pytest.mark.parametrize("world", [(1, 1), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("row", list(ROWS))
def test_adamw_gets_views_that_begin_and_end_where_whole_blocks_do(row: str, world: tuple[int, int]) -> None:
    """A kernel reads 16 bytes at a time only if all four tensors of a view begin at multiples of 16 bytes; others round differently."""

    def program(backend: VirtualBackend) -> list[Tensor]:
        rank = Rank(Job(ROWS[row], shape=ModelShape(inner=(17, 5))), backend)
        views = list(_views_of_adamw(rank))
        rank.engine.close()
        return views

    of_ranks = run_world(world, program)
    assert any(of_ranks)  # a rank may have nothing but padding
    for views in of_ranks:
        assert all(view.numel() % 32 == 0 and view.storage_offset() % 32 == 0 and view.is_contiguous() for view in views)


def _views_of_adamw(rank: Rank) -> Iterator[Tensor]:
    for group in rank.engine.optimizer._groups:
        if group.adam is not None:
            for lists in group.adam._lists:  # type: ignore[attr-defined]
                yield from (*lists.parameters, *(parameter.grad for parameter in lists.parameters), *lists.exp_avgs, *lists.exp_avg_sqs)


def test_weight_decay_that_changes_among_parameters_of_one_dimension_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unit_specs = SmallModel.unit_specs

    def with_decaying_biases(model: SmallModel) -> tuple[UnitSpec, ...]:
        return tuple(
            replace(unit, params=tuple(replace(param, weight_decay=not param.name.endswith("up.bias")) for param in unit.params))
            for unit in unit_specs(model)
        )

    monkeypatch.setattr(SmallModel, "unit_specs", with_decaying_biases)
    with pytest.raises(UserError, match="unit block.0: weight decay changes at element .* the same weight decay"):
        run_world((1, 1), lambda backend: Rank(Job(), backend))


def test_a_step_that_is_skipped_on_the_device_changes_nothing_whatever_the_gradients_are() -> None:
    parameter = torch.nn.Parameter(torch.randn(64))
    state = {name: torch.rand(64) for name in MOMENTS}
    parameter.grad = torch.full((64,), float("nan"))
    adam = make_adam([AdamGroup(decays=True, steps=3, states={parameter: state})], AdamOptions())
    before = [tensor.detach().clone() for tensor in (parameter, *state.values())]
    adam.update(LEARNING_RATE, 0.1, torch.ones(()))
    assert adam.steps == [3]
    assert all(torch.equal(now, then) for now, then in zip((parameter, *state.values()), before, strict=True))
    parameter.grad = torch.ones(64)
    adam.update(LEARNING_RATE, 0.1, torch.zeros(()))
    assert adam.steps == [4] and not torch.equal(parameter, before[0])


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
        rank.engine.optimizer.resume(10_000_000, {})  # bias corrections are 1 by then
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
