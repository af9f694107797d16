"""The optimizer's state on the host: the bits of a run without offload, and the bytes of the plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from harness.codes import lean
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.planned_engine import planned_step
from harness.planned_rank import states_of
from harness.small_engine import LEARNING_RATE, Job, ModelShape, Rank, train_world
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import Code
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.plan.kinds import COPY, GRADIENTS, OPTIMIZER, PAYLOADS, PINNED
from megatron_zpp.zero.loss_scaler import DynamicLossScaler
from megatron_zpp.zero.pieces import owned_pieces
from megatron_zpp.zero.policy import (
    POLICIES,
    ZEROPP,
    Policy,
    Rung,
    with_gradients_summed_on_secondary,
    with_offloaded_optimizer,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
)
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

LEAN = lean(3)
ROWS: dict[str, Policy] = {
    "stage 1": POLICIES[1],
    "stage 2": POLICIES[2],
    "stage 3": POLICIES[3],
    "qwZ": with_quantized_weights(POLICIES[3]),
    "qwZ in stage 1": with_quantized_weights(POLICIES[1], Code(4)),
    "hpZ": with_secondary_weights(POLICIES[3]),
    "qgZ": with_quantized_gradients(POLICIES[2]),
    "ZeRO++": ZEROPP,
    "lean": with_gradients_summed_on_secondary(LEAN),
    "lean in stage 1": lean(1),
}
SHAPE = ModelShape()


def job_of(policy: Policy, **changes: object) -> Job:
    return dataclasses.replace(Job(policy, torch.bfloat16, SHAPE, block_numel=256), **changes)  # type: ignore[arg-type]


def offloaded(job: Job) -> Job:
    return dataclasses.replace(job, policy=with_offloaded_optimizer(job.policy))


# Every row in a world where its codes and rungs matter; every world, precision, number of micro-batches and of recomputed blocks.
@pytest.mark.parametrize(
    "row, world, dtype, microbatches, chunk",
    [
        ("stage 1", (1, 1), torch.float32, 2, 1),
        ("stage 2", (1, 2), torch.float16, 1, 2),
        ("stage 3", (2, 1), torch.bfloat16, 2, 0),
        ("qwZ", (3, 2), torch.float32, 1, 1),
        ("qwZ in stage 1", (2, 1), torch.float16, 1, 1),
        ("hpZ", (2, 2), torch.bfloat16, 2, 2),
        ("qgZ", (2, 2), torch.float32, 1, 0),
        ("ZeRO++", (2, 2), torch.float16, 2, 0),
        ("lean", (2, 2), torch.bfloat16, 2, 1),
        ("lean in stage 1", (2, 1), torch.float32, 2, 2),
    ],
    ids=str,
)
def test_an_offloaded_optimizer_changes_no_bit(row: str, world: tuple[int, int], dtype: torch.dtype, microbatches: int, chunk: int) -> None:
    shape = dataclasses.replace(SHAPE, is_recomputed=chunk > 0, chunk=max(1, chunk))
    job = job_of(ROWS[row], dtype=dtype, microbatches=microbatches, shape=shape)
    assert train_world(world, offloaded(job)) == train_world(world, job)


def overflowing() -> DynamicLossScaler:
    return DynamicLossScaler(scale=2.0**18, hysteresis=1)


def written(histories: list[list[tuple[float, float]]]) -> list[list[tuple[str, str]]]:
    """Written out: the norm of a skipped step may be NaN."""
    return [[(loss.hex(), norm.hex()) for loss, norm in history] for history in histories]


@pytest.mark.parametrize(
    "row, changes",
    [
        ("stage 3", {"prefetch": Prefetch(0, 0)}),
        ("ZeRO++", {"full_precision_iterations": 2}),
        ("qwZ", {"full_precision_iterations": 1, "steps": 2}),  # keeps its payload within a step
        ("lean in stage 1", {"prefetch": Prefetch(4, 3), "full_precision_iterations": 1}),
        ("stage 1", {"prefetch": Prefetch(0, 3), "dtype": torch.float16, "steps": 4, "loss_scaler": overflowing}),
        ("ZeRO++", {"dtype": torch.float16, "steps": 4, "loss_scaler": overflowing}),
    ],
    ids=["no prefetch", "two full-precision steps", "one", "much prefetch", "skipped steps", "skipped steps of ZeRO++"],
)
def test_neither_prefetch_nor_skipped_steps_nor_a_start_in_full_precision_change_a_bit(row: str, changes: dict[str, object]) -> None:
    job = job_of(ROWS[row], **changes)
    found, expected = (train_world((2, 2), some) for some in (offloaded(job), job))
    assert written(found) == written(expected)
    is_finite = [math.isfinite(norm) for _, norm in found[0]]
    assert is_finite[-1] and all(is_finite) is (job.loss_scaler is None)


def with_evaluations(job: Job) -> Callable[[VirtualBackend], list[tuple[float, float]]]:
    def program(backend: VirtualBackend) -> list[tuple[float, float]]:
        rank = Rank(job, backend)
        history = []
        for step in range(job.steps):
            loss, result = rank.step(step)
            history.append((loss, result.grad_norm))
            with torch.no_grad():
                history += [(rank.loss(50 + index).item(), rank.engine.weight_norm()) for index in range(3)]
        rank.engine.close()
        return history

    return program


@pytest.mark.parametrize("row", ["stage 1", "lean"])
def test_three_evaluations_after_each_step_have_the_losses_and_norms_of_a_run_without_offload(row: str) -> None:
    job = job_of(ROWS[row], steps=2)
    assert run_world((2, 2), with_evaluations(offloaded(job))) == run_world((2, 2), with_evaluations(job))


# ---- skipped steps


@pytest.mark.parametrize("row, world", [("stage 2", (1, 2)), ("ZeRO++", (2, 2))], ids=str)
def test_a_skipped_step_moves_nothing_over_the_host_link_and_changes_no_weight(row: str, world: tuple[int, int]) -> None:
    job = offloaded(job_of(ROWS[row], dtype=torch.float16, steps=4, loss_scaler=overflowing))

    def program(gpu: Gpu) -> list[tuple[bool, int, bool]]:
        rank = Rank(job, gpu.backend, lanes=gpu.lanes, streams=gpu.machine)
        found = []
        for step in range(job.steps):
            loss = rank.loss(step)
            rank.backward(loss)
            with gpu.accesses.paused():
                before = [piece.values.clone() for piece in owned_pieces(rank.engine)]
                crossed = rank.engine.links.host_link.crossings
            result = rank.engine.step(LEARNING_RATE)
            with gpu.accesses.paused():
                same = all(torch.equal(piece.values, values) for piece, values in zip(owned_pieces(rank.engine), before, strict=True))
            found.append((result.is_skipped, rank.engine.links.host_link.crossings - crossed, same))
        rank.engine.close()
        return found

    for found in run_on_gpus(world, program):
        skipped = [(crossings, same) for is_skipped, crossings, same in found if is_skipped]
        made = [(crossings, same) for is_skipped, crossings, same in found if not is_skipped]
        assert skipped and all(crossings == 0 and same for crossings, same in skipped)
        assert made and all(crossings > 0 and not same for crossings, same in made)


# ---- bytes


def slice_numel(rank: Rank) -> int:
    return sum(unit.layout.slice_numel for unit in rank.engine.units)


@pytest.mark.parametrize("row, world", [(row, [(1, 1), (1, 2), (2, 1), (2, 2)][index % 4]) for index, row in enumerate(ROWS)], ids=str)
def test_states_on_device_and_host_are_those_of_the_plan_to_the_byte(row: str, world: tuple[int, int]) -> None:
    job = offloaded(job_of(ROWS[row]))
    planned = sum(states_of(planned_step(job, Grid.of_nodes(*world)).engine).values())

    def program(backend: VirtualBackend) -> None:
        rank = Rank(job, backend)
        for step in range(2):
            rank.accumulate(step)
            rank.engine.finish_gradients()
            states = rank.engine.state_bytes()
            assert states.device + states.host == planned and states.host == 12 * slice_numel(rank)
            rank.engine.step(0.1)
        rank.engine.close()

    run_world(world, program)


@pytest.mark.parametrize(
    "row, world, microbatches, exact_iterations",
    [("stage 2", (2, 1), 2, 0), ("stage 3", (1, 1), 1, 0), ("stage 3", (1, 2), 2, 0), ("ZeRO++", (2, 2), 1, 1), ("lean", (2, 1), 2, 0)],
    ids=str,
)
def test_a_device_holds_4_bytes_per_owned_parameter_and_rungs_and_its_host_12_or_14_and_two_units_of_staging(
    row: str, world: tuple[int, int], microbatches: int, exact_iterations: int
) -> None:
    """To the byte of the plan. Each unit crosses the host link once per step in each direction, whatever the number of micro-batches."""
    job = offloaded(job_of(ROWS[row], full_precision_iterations=exact_iterations, microbatches=microbatches, steps=2))

    planned = planned_step(job, Grid.of_nodes(*world), is_on_gpu=True)
    plan, states = planned.engine, states_of(planned.engine)
    kept = states[COPY] if job.policy.weights_in_step is Rung.SECONDARY else 0
    on_host = sum(plan.host_states.values(), start=Counter[str]())

    def program(gpu: Gpu) -> None:
        rank = Rank(job, gpu.backend, lanes=gpu.lanes, streams=gpu.machine)
        crossings = []
        for step in range(job.steps):
            rank.accumulate(step)
            rank.engine.finish_gradients()
            if step >= exact_iterations:
                assert rank.engine.state_bytes().device <= sum(states.values())
                assert exact_iterations or rank.engine.state_bytes().device == sum(states.values())
            crossings.append(rank.engine.links.host_link.crossings)
            rank.engine.step(0.1)
        owned, differs = slice_numel(rank), row == "lean"
        assert rank.engine.state_bytes().host == on_host.total() == (14 if differs else 12) * owned
        if job.policy.gradients is Rung.PRIMARY:
            assert states[GRADIENTS] == 4 * owned and OPTIMIZER not in states
        assert rank.engine.links.host_link.pinned_bytes == plan.on_host[PINNED]
        staging = rank.engine.links.staging.allocated_bytes
        assert exact_iterations or staging <= planned.memory.on_device[PAYLOADS] + kept  # else the plan's peak is in an exact step
        rank.engine.close()
        assert [after - before for before, after in itertools.pairwise(crossings)] == [2 * len(rank.engine.units)] * (job.steps - 1)

    run_on_gpus(world, program)


# ---- what has no meaning


def test_stage_0_has_no_owner_of_a_slice_and_cannot_be_offloaded() -> None:
    with pytest.raises(UserError, match="no owner of a slice"):
        with_offloaded_optimizer(POLICIES[0])


@pytest.mark.parametrize("changes", [{"gradients": Rung.HOST}, {"weights_in_step": Rung.HOST}], ids=str)
def test_neither_gradients_nor_working_weights_rest_on_the_host(changes: dict[str, Rung]) -> None:
    with pytest.raises(UserError, match="only the optimizer state"):
        dataclasses.replace(with_offloaded_optimizer(POLICIES[3]), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("row, grid", [("stage 1", Grid.of_nodes(2, 2, 2)), ("ZeRO++", Grid.of_nodes(2, 4, 2))], ids=str)
def test_ranks_that_share_layers_offload_their_parts_without_changing_a_bit(row: str, grid: Grid) -> None:
    job = job_of(ROWS[row])
    assert train_world(grid, offloaded(job)) == train_world(grid, job)
