from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
import torch
from harness.fake_streams.gpus import run_on_gpus
from harness.small_engine import (
    CLIP_GRAD,
    LEARNING_RATE,
    ROWS,
    Job,
    ModelShape,
    Rank,
    SmallModel,
    global_batch,
    mean_losses,
    plain_model,
    train_world,
)
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

History = list[tuple[float, float]]


def _train(
    rank: Rank, before_backward: Callable[[int], None] = lambda step: None, before_forward: Callable[[int], None] = lambda step: None
) -> History:
    """Like Rank.train, with something in between."""
    history = []
    for step in range(rank.job.steps):
        total = 0.0
        for microbatch in range(rank.job.microbatches):
            before_forward(step)
            loss = rank.loss(step, microbatch)
            before_backward(step)
            rank.backward(loss, microbatch)
            total += loss.item()
        history.append((total / rank.job.microbatches, rank.engine.step(LEARNING_RATE).grad_norm))
    rank.engine.close()
    return history


# ---- parameters without gradient


@pytest.mark.parametrize("row, prefetch", [(row, Prefetch(*[(2, 1), (0, 0)][index % 2])) for index, row in enumerate(ROWS)], ids=str)
def test_a_block_whose_output_gets_no_gradient_on_any_rank_is_not_updated(row: str, prefetch: Prefetch) -> None:
    job = Job(ROWS[row], shape=ModelShape(inner=(9, 20, 13)), steps=2, microbatches=2, prefetch=prefetch)
    histories = run_world((2, 2), lambda backend: _train(_with_detached_block(job, backend)))
    assert mean_losses(histories) == pytest.approx(_losses_with_detached_block(tuple(range(4)))[:2], rel=1e-6)


@pytest.mark.parametrize(
    "row, prefetch",
    [
        ("stage 0", Prefetch()),
        ("stage 1", Prefetch(3, 3)),
        ("stage 2", Prefetch()),
        *(("stage 3", prefetch) for prefetch in (Prefetch(), Prefetch(0, 0), Prefetch(3, 3))),
        ("secondary row", Prefetch(0, 0)),
    ],
    ids=str,
)
def test_a_block_whose_output_gets_no_gradient_on_one_rank_only_holds_up_nobody(row: str, prefetch: Prefetch) -> None:
    shape = ModelShape(inner=(9, 20, 13), is_recomputed=prefetch.inter_uses > 2, chunk=3)
    job = Job(ROWS[row], shape=shape, steps=2, microbatches=2, prefetch=prefetch)

    def program(backend: VirtualBackend) -> History:
        return _train(_with_detached_block(job, backend) if backend.rank == 1 else Rank(job, backend))

    histories = run_world((2, 2), program)
    assert mean_losses(histories) == pytest.approx(_losses_with_detached_block((1,))[:2], rel=1e-6)


@pytest.mark.parametrize("row, shape", [*((row, (2, 2)) for row in ROWS), ("stage 3", (1, 1))], ids=str)
def test_a_block_that_gets_no_gradient_in_one_step_keeps_none_of_the_step_before(row: str, shape: tuple[int, int]) -> None:
    job = Job(ROWS[row], shape=ModelShape(inner=(9, 20, 13)), steps=3, microbatches=2)

    def program(backend: VirtualBackend) -> History:
        rank = Rank(job, backend)
        return _train(rank, before_forward=lambda step: setattr(rank.model, "detached_block", 1 if step == 1 else None))

    assert mean_losses(run_world(shape, program)) == pytest.approx(_losses_with_detached_block(tuple(range(4)), steps=(1,)), rel=1e-6)


@cache
def _losses_with_detached_block(ranks: tuple[int, ...], steps: tuple[int, ...] = (0, 1, 2)) -> list[float]:
    """Of a plain loop over what four ranks would get in two micro-batches, with the block detached on some ranks in some steps."""
    model = plain_model(ModelShape(inner=(9, 20, 13)))
    decayed, others = ([each for each in model.parameters() if (each.ndim > 1) is decays] for decays in (True, False))
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=LEARNING_RATE)
    losses = []
    for step in range(3):
        tokens, labels = global_batch(step)
        total = torch.zeros(())
        for part in range(8):
            model.detached_block = 1 if part % 4 in ranks and step in steps else None
            rows = slice(part * len(tokens) // 8, (part + 1) * len(tokens) // 8)
            total = total + model(tokens[rows], labels[rows]) / 8
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        losses.append(total.item())
    return losses


def _with_detached_block(job: Job, backend: VirtualBackend) -> Rank:
    rank = Rank(job, backend)
    rank.model.detached_block = 1
    return rank


# ---- recomputation


def test_blocks_that_are_recomputed_together_without_saying_so_end_in_an_error_instead_of_computing_with_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uses = SmallModel.uses
    monkeypatch.setattr(SmallModel, "uses", lambda model: tuple(dataclasses.replace(use, recomputed_in=None) for use in uses(model)))
    job = Job(POLICIES[3], shape=ModelShape(inner=(9, 20, 13), is_recomputed=True, chunk=3), prefetch=Prefetch(0, 0))
    with pytest.raises(RuntimeError, match="full rung is stale"):
        run_world((2, 1), lambda backend: Rank(job, backend).train())


# ---- evaluation in between


@pytest.mark.parametrize(
    "row, prefetch, is_recomputed",
    [
        *((row, Prefetch(), False) for row in ("stage 0", "stage 2", "stage 3")),
        *((row, Prefetch(3, 3), True) for row in ("stage 1", "secondary row")),
        ("stage 3", Prefetch(0, 0), True),
    ],
    ids=str,
)
def test_evaluation_before_any_forward_or_backward_changes_no_bit(row: str, prefetch: Prefetch, is_recomputed: bool) -> None:
    job = Job(ROWS[row], shape=ModelShape(is_recomputed=is_recomputed), steps=2, microbatches=2, prefetch=prefetch)

    def program(backend: VirtualBackend) -> History:
        rank = Rank(job, backend)

        @torch.no_grad()
        def evaluate(step: int) -> None:
            rank.model.eval()
            rank.loss(step + 100)
            rank.model.train()

        return _train(rank, evaluate, evaluate)

    assert run_world((2, 2), program) == train_world((2, 2), job)


@pytest.mark.parametrize("row", list(ROWS))
def test_an_evaluation_sees_the_weights_of_the_latest_step(row: str) -> None:
    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(ROWS[row]), backend)
        for step in range(2):
            with torch.no_grad():
                evaluated = rank.loss(step + 1).item()
            trained = rank.loss(step + 1)
            assert trained.item() == evaluated
            rank.backward(trained)
            rank.engine.step(LEARNING_RATE)
        rank.engine.close()

    run_world((2, 2), program)


@pytest.mark.parametrize("row", ["stage 0", "stage 2", "stage 3", "secondary row"])
def test_a_forward_that_is_thrown_away_changes_no_bit(row: str) -> None:
    job = Job(ROWS[row], steps=2, microbatches=2)

    def program(backend: VirtualBackend) -> History:
        rank = Rank(job, backend)
        return _train(rank, before_forward=lambda step: rank.loss(step + 100) and None)

    assert run_world((2, 2), program) == train_world((2, 2), job)


# ---- skipped steps


@pytest.mark.parametrize(
    "row, dtype, bad", [*((row, torch.float32, float("nan")) for row in ROWS), ("stage 3", torch.bfloat16, float("inf"))], ids=str
)
def test_one_bad_element_on_one_rank_skips_the_step_on_every_rank_as_if_it_had_never_been(row: str, dtype: torch.dtype, bad: float) -> None:
    job = Job(ROWS[row], dtype)

    def program(backend: VirtualBackend) -> tuple[History, bool, bool]:
        rank = Rank(job, backend)
        first = rank.step(0)
        weights = [unit.main_weight.clone() for unit in rank.engine.units]
        moments = [tensor.clone() for tensor in rank.engine.optimizer.live_tensors()]
        remove = _spoil_one_gradient(rank, bad) if backend.rank == 2 else lambda: None
        _, result = rank.step(50)
        remove()
        is_untouched = all(torch.equal(unit.main_weight, before) for unit, before in zip(rank.engine.units, weights, strict=True))
        is_untouched &= all(torch.equal(now, before) for now, before in zip(rank.engine.optimizer.live_tensors(), moments, strict=True))
        history = [(first[0], first[1].grad_norm)]
        for step in (1, 2):
            loss, outcome = rank.step(step)
            history.append((loss, outcome.grad_norm))
        rank.engine.close()
        return history, result.is_skipped and rank.engine.optimizer.steps == 3, is_untouched

    results = run_world((2, 2), program)
    assert all(is_skipped and is_untouched for _, is_skipped, is_untouched in results)
    assert [history for history, _, _ in results] == train_world((2, 2), job)


@pytest.mark.parametrize("row", ["stage 1", "stage 3"])
def test_an_update_that_a_report_refuses_is_skipped_as_if_the_step_had_never_been_whether_host_or_device_decides(row: str) -> None:
    """Rank 1 alone reports that step 50 is refused. All ranks get the reports of both, rank by rank."""
    job = Job(ROWS[row], steps=3)

    def train(rank: Rank) -> tuple[History, bool]:
        history, refused = [], None
        for step, is_refused in ((0, False), (50, True), (1, False), (2, False)):
            loss = rank.accumulate(step)
            rank.engine.finish_gradients()
            own = torch.tensor([step, is_refused and rank.backend.rank == 1], dtype=torch.float64)
            result = rank.engine.update(LEARNING_RATE, report=own, refuses=lambda of_ranks: of_ranks[1, 1] != 0)
            assert result.report == (step, 0, step, is_refused)
            refused = result if is_refused else refused
            history += [(loss, result.grad_norm)] * (not is_refused)
        rank.engine.close()
        return history, refused is not None and refused.is_skipped and rank.engine.optimizer.steps == 3

    on_host = run_world((1, 2), lambda backend: train(Rank(job, backend)))
    on_device = run_on_gpus((1, 2), lambda gpu: train(Rank(job, gpu.backend, lanes=gpu.lanes, streams=gpu.machine)))
    assert on_host == on_device == [(history, True) for history in train_world((1, 2), job)]


def _spoil_one_gradient(rank: Rank, bad: float) -> Callable[[], None]:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[3] = bad
        return spoilt

    handle = rank.model.get_submodule("blocks.1.up").weight.register_hook(spoil)  # type: ignore[union-attr, operator]
    return lambda: handle.remove()


# ---- weights from outside, and misuse


@pytest.mark.parametrize("row, moment", [*((row, "after a step") for row in ROWS), ("stage 3", "before the first step")])
def test_main_weights_set_from_outside_are_seen_by_the_next_forward(row: str, moment: str) -> None:
    def program(backend: VirtualBackend) -> float:
        rank = Rank(Job(ROWS[row]), backend)
        if moment == "after a step":
            rank.step(0)
        for unit in rank.engine.units:
            for segment in unit.layout.segments(unit.first_slice, unit.slices):
                values = segment.spec.initial_values(segment.start, segment.stop) * 1.5
                unit.main_weight[segment.offset : segment.offset + values.numel()] = values
        rank.engine.weights_changed()
        loss = rank.loss(3)
        rank.backward(loss)
        rank.engine.close()
        return loss.item()

    model = plain_model(ModelShape())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    expected = model(*global_batch(3)).item()
    losses = run_world((2, 2), program)
    assert sum(losses) / 4 == pytest.approx(expected, rel=1e-6)


def test_backward_of_the_loss_itself_is_refused_and_leaves_no_gradient_behind() -> None:
    job = Job(POLICIES[3], steps=2)

    def program(backend: VirtualBackend) -> History:
        rank = Rank(job, backend)
        with pytest.raises(RuntimeError, match=r"engine\.backward\(loss\)"):
            rank.loss(0).backward()
        assert all(parameter.grad is None for parameter in rank.model.parameters())
        return rank.train()

    assert run_world((2, 2), program) == train_world((2, 2), job)


def test_an_update_before_the_gradients_have_arrived_is_refused() -> None:
    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(POLICIES[3], steps=1), backend)
        rank.backward(rank.loss(0))
        with pytest.raises(RuntimeError, match=r"call engine\.finish_gradients\(\) before engine\.update\(\)"):
            rank.engine.update(LEARNING_RATE)
        rank.engine.finish_gradients()
        rank.engine.update(LEARNING_RATE)
        rank.engine.close()

    run_world((2, 2), program)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_that_fails_between_collectives_ends_every_rank_with_its_message(place: str) -> None:
    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(POLICIES[3]), backend)
        rank.step(0)
        if backend.rank == 3:
            module = rank.model.blocks[1]
            register = module.register_forward_pre_hook if place == "forward" else module.register_full_backward_pre_hook
            register(_fail)  # type: ignore[operator]
        rank.step(1)

    with pytest.raises(ArithmeticError, match="rank 3 has had enough"):
        run_world((2, 2), program)


def _fail(*_: object) -> None:
    raise ArithmeticError("rank 3 has had enough")


def test_clip_grad_zero_means_no_clipping() -> None:
    job = Job(POLICIES[3], clip_grad=0.0, steps=3)
    free = dataclasses.replace(job, clip_grad=1e9)
    assert train_world((1, 2), job) == train_world((1, 2), free)


def test_a_closed_engine_refuses_a_backward_instead_of_losing_its_gradients() -> None:
    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(POLICIES[3], steps=1), backend)
        rank.step(0)
        rank.engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            rank.backward(rank.loss(1))

    run_world((1, 2), program)
