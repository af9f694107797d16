from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from harness.codes import bits_of
from harness.matrix_model import BLOCK, PARAMETERS, WORLD, MatrixRank
from harness.seen_weights import WholeWorld, watch
from harness.small_engine import LEARNING_RATE, Job, ModelShape, Rank, mean_losses, train_world
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import Code
from megatron_zpp.comm.codecs import make_codec
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Link
from megatron_zpp.zero.loss_scaler import DynamicLossScaler
from megatron_zpp.zero.policy import POLICIES, Policy, with_quantized_gradients, with_quantized_weights, with_secondary_weights

pytestmark = pytest.mark.virtual

QWZ, QGZ = with_quantized_weights(POLICIES[3]), with_quantized_gradients(POLICIES[3])
ROWS = {"ZeRO-3": POLICIES[3], "qwZ": QWZ, "qgZ": QGZ, "qwZ+qgZ": with_quantized_gradients(QWZ)}
SMALL_PARTITIONS = Grid(4, ranks_per_node=4, partition_ranks=2)
OF_TWO_NODES = Grid(8, ranks_per_node=4, partition_ranks=2)


def _soon_too_large() -> DynamicLossScaler:
    """Starts above what fp16 holds and grows there again every few steps."""
    return DynamicLossScaler(scale=2.0**20, window=7, hysteresis=1)


# ---- on and off


@dataclass(frozen=True)
class Step:
    """What one rank sees of a step."""

    losses: tuple[float, ...]  # of micro-batches, and of evaluations in between
    grad_norm: float
    is_skipped: bool
    loss_scale: float


def _history(grid: Grid, job: Job) -> list[list[Step]]:
    """By rank: steps with accumulation, evaluations before, within and after them, and steps that are skipped."""

    def program(backend: VirtualBackend) -> list[Step]:
        rank = Rank(job, backend)
        steps = [_busy_step(rank, step) for step in range(job.steps)]
        rank.engine.close()
        return steps

    return run_world(grid, program)


def _busy_step(rank: Rank, step: int) -> Step:
    losses = []
    has_overflow = rank.job.dtype != torch.float16 and step % 8 == 2 and rank.backend.rank == 1
    for microbatch in range(rank.job.microbatches):
        if (step + microbatch) % 6 == 1:
            losses.append(_evaluate(rank, 100 + step))
        loss = rank.loss(step, microbatch)
        if (step + microbatch) % 7 == 2:
            losses.append(_evaluate(rank, 200 + step))
        rank.backward(loss * float("inf") if has_overflow and microbatch == 1 else loss, microbatch)
        losses.append(loss.item())
    result = rank.engine.step(LEARNING_RATE)
    if step % 4 == 0:
        losses.append(_evaluate(rank, 300 + step))
    return Step(tuple(losses), result.grad_norm if not result.is_skipped else 0.0, result.is_skipped, rank.engine.loss_scaler.scale)


@torch.no_grad()
def _evaluate(rank: Rank, step: int) -> float:
    return rank.loss(step).item()


TINY = ModelShape((5,), is_recomputed=True)
LONG = Job(ROWS["ZeRO-3"], torch.float16, TINY, steps=14, microbatches=2, loss_scaler=_soon_too_large)


@pytest.mark.parametrize("row", [pytest.param("ZeRO-3", marks=pytest.mark.long), "qwZ"])
def test_many_steps_have_the_same_bits_with_the_secondary_rung_kept_or_not(row: str) -> None:
    _check_same_bits(Grid.of_nodes(2, 2), dataclasses.replace(LONG, policy=ROWS[row]))


JOBS = {
    "ZeRO-3, bf16, kept": Job(ROWS["ZeRO-3"], torch.bfloat16, ModelShape((17,)), steps=4, microbatches=2),
    "qgZ, fp32, kept": Job(ROWS["qgZ"], torch.float32, ModelShape((17,)), steps=4, microbatches=2),
    "qwZ+qgZ, bf16, recomputed": Job(ROWS["qwZ+qgZ"], torch.bfloat16, TINY, steps=4, microbatches=2),
    "qwZ+qgZ, fp16, recomputed": dataclasses.replace(LONG, policy=ROWS["qwZ+qgZ"], steps=9),
}


@pytest.mark.parametrize("name", [*list(JOBS)[:3], pytest.param(list(JOBS)[3], marks=pytest.mark.long)])
def test_shorter_runs_have_the_same_bits_with_the_secondary_rung_kept_or_not(name: str) -> None:
    _check_same_bits(Grid.of_nodes(2, 2), JOBS[name])


@pytest.mark.parametrize("world, row", [((1, 2), "qwZ"), ((2, 1), "qwZ+qgZ"), ((3, 2), "qwZ+qgZ")], ids=str)
def test_runs_have_the_same_bits_with_the_secondary_rung_kept_or_not_in_other_worlds(world: tuple[int, int], row: str) -> None:
    _check_same_bits(Grid.of_nodes(*world), Job(ROWS[row], torch.bfloat16, ModelShape((17,), is_tied=False), steps=4, microbatches=2))


@pytest.mark.parametrize("row", [pytest.param("qwZ", marks=pytest.mark.long), "qwZ+qgZ"])
def test_runs_have_the_same_bits_with_the_secondary_rung_kept_or_not_in_partitions_smaller_than_a_node(row: str) -> None:
    _check_same_bits(SMALL_PARTITIONS, Job(ROWS[row], torch.bfloat16, ModelShape((17,)), steps=4, microbatches=2))


@pytest.mark.parametrize("row, grid", [("ZeRO-3", SMALL_PARTITIONS), ("qwZ+qgZ", OF_TWO_NODES)], ids=str)
def test_a_partition_smaller_than_a_node_has_the_bits_of_nodes_of_its_size(row: str, grid: Grid) -> None:
    job = Job(with_secondary_weights(ROWS[row]), torch.bfloat16, ModelShape((17,)), microbatches=2)
    assert _history(grid, job) == _history(Grid.of_nodes(grid.world_size // 2, 2), job)


@pytest.mark.parametrize("row", ["ZeRO-3", "qwZ"])
def test_a_partition_smaller_than_a_node_changes_the_gradients_bits_but_not_the_first_loss(row: str) -> None:
    job = Job(ROWS[row], torch.float32, ModelShape((17,)))
    kept = train_world(SMALL_PARTITIONS, dataclasses.replace(job, policy=with_secondary_weights(job.policy)))
    plain = train_world(Grid.of_nodes(1, 4), job)
    assert [history[0][0] for history in kept] == [history[0][0] for history in plain]
    assert kept != plain
    assert mean_losses(kept) == pytest.approx(mean_losses(plain), rel=1e-6 if row == "ZeRO-3" else 1e-3)  # a weight may get another code


def _check_same_bits(grid: Grid, job: Job) -> None:
    without = _history(grid, job)
    assert _history(grid, dataclasses.replace(job, policy=with_secondary_weights(job.policy))) == without
    skipped = [step.is_skipped for step in without[0]]
    assert 0 < sum(skipped) < job.steps / 2


# ---- fresh, always


def _set_weights(rank: Rank, factor: float) -> None:
    for unit in rank.engine.units:
        unit.main_weight.mul_(factor)
    rank.engine.weights_changed()


def _load_weights(rank: Rank, factor: float) -> None:
    """The same through pieces of parameters, one at a time, as a checkpoint is loaded."""
    for unit in rank.engine.units:
        for segment in unit.layout.segments(unit.first_slice, unit.slices):
            place = slice(segment.offset, segment.offset + segment.stop - segment.start)
            unit.main_weight[place] = segment.spec.initial_values(segment.start, segment.stop) * factor
    rank.engine.weights_changed()


WRITES: dict[str, Callable[[Rank, float], None]] = {"set": _set_weights, "load": _load_weights}


@pytest.mark.parametrize(
    "grid, write, row",
    [(Grid.of_nodes(2, 2), "set", "ZeRO-3"), (Grid.of_nodes(2, 2), "load", "qwZ"), (SMALL_PARTITIONS, "set", "qwZ")],
    ids=str,
)
def test_no_forward_or_backward_ever_reads_a_stale_replica(grid: Grid, write: str, row: str) -> None:
    """Whatever came before: a step, a skipped step, an evaluation, or weights that were set after any of these, before the first too."""
    job = Job(with_secondary_weights(ROWS[row]), torch.bfloat16, ModelShape((17,)), microbatches=2)
    whole = WholeWorld(grid.world_size)

    def program(backend: VirtualBackend) -> int:
        rank = Rank(job, backend)
        looks = 0

        def check(phase: str, unit: str, values: Tensor) -> None:
            nonlocal looks
            looks += 1
            assert torch.equal(values, whole.working_weights(unit, bits_of(job.policy.weight_codes))), (phase, unit)

        watch(rank, check)
        for step in range(5):
            if step in (0, 2, 4):
                WRITES[write](rank, 1.0 + 0.1 * (step + 1))
            whole.join(rank)  # nobody writes any more
            if step in (1, 4):
                _evaluate(rank, 60)
            loss = rank.loss(step)
            _evaluate(rank, 70)
            rank.backward(loss * float("nan") if step in (1, 3) and backend.rank == 0 else loss, 0)
            rank.backward(rank.loss(step, 1), 1)
            whole.join(rank)  # nobody reads any more
            assert rank.engine.step(LEARNING_RATE).is_skipped == (step in (1, 3))
        rank.engine.close()
        return looks

    assert all(looks >= 5 * 2 * 5 for looks in run_world(grid, program))


@pytest.mark.parametrize("row", ["ZeRO-3", "qwZ+qgZ"])
def test_weights_cross_the_inter_link_once_per_step_and_not_at_all_after_a_skipped_one(row: str) -> None:
    def program(backend: VirtualBackend) -> list[int]:
        rank = Rank(Job(with_secondary_weights(ROWS[row]), torch.bfloat16, ModelShape((17,)), microbatches=2), backend)
        before, by_step = Traffic(), []
        for step in range(6):
            for microbatch in range(2):
                loss = rank.loss(step, microbatch)
                _evaluate(rank, 80)
                rank.backward(loss * float("nan") if step in (2, 3) and backend.rank == 3 else loss, microbatch)
            rank.engine.step(LEARNING_RATE)
            now = rank.ledger.total(Category.WEIGHTS)
            by_step.append((now - before).inter_bytes)
            before = now
        assert rank.ledger.total(Category.EVALUATION).inter_bytes == 0
        rank.engine.close()
        return by_step

    for first, *others in run_world((2, 2), program):
        assert first > 0 and others == [first, first, 0, 0, first]


# ---- memory


def _state_bytes(policy: Policy) -> tuple[int, int, int]:
    """Of the first rank at the end of a backward, and once the weights have changed; and at the first moment without a secondary rung."""

    def program(backend: VirtualBackend, policy: Policy) -> tuple[int, int]:
        rank = MatrixRank(policy, backend)
        rank.accumulate(2)
        rank.engine.finish_gradients()
        within = rank.engine.state_bytes().device
        rank.engine.weights_changed()
        between = rank.engine.state_bytes().device
        rank.engine.close()
        return within, between

    within, between = run_world(WORLD, lambda backend: program(backend, with_secondary_weights(policy)))[0]
    without, _ = run_world(WORLD, lambda backend: program(backend, policy))[0]
    return within, between, without


@pytest.mark.parametrize("policy", [POLICIES[3], QGZ], ids=["hpZ", "hpZ+qgZ"])
def test_a_secondary_rung_takes_two_bytes_per_parameter_and_rank_of_the_node(policy: Policy) -> None:
    within, between, without = _state_bytes(policy)
    assert within - without == 2 * PARAMETERS // WORLD[1]
    assert between == without == 16 * PARAMETERS // (WORLD[0] * WORLD[1])


@pytest.mark.parametrize("bits, bytes_per_parameter", [(8, 1), (4, 0.5)])
def test_a_quantized_secondary_rung_takes_its_codes_and_scales(bits: int, bytes_per_parameter: float) -> None:
    within, between, _ = _state_bytes(with_quantized_weights(POLICIES[3], Code(bits)))
    assert within - between == PARAMETERS // WORLD[1] * (bytes_per_parameter + 4 / BLOCK)
    assert between == 16 * PARAMETERS // (WORLD[0] * WORLD[1])


def test_the_buffers_of_secondary_rungs_are_used_again_in_the_next_step() -> None:
    def program(backend: VirtualBackend) -> tuple[list[int], int]:
        rank = Rank(Job(with_secondary_weights(QWZ), torch.bfloat16, ModelShape((17,)), microbatches=2), backend)
        allocated = []
        for step in range(6):
            rank.step(step)
            allocated.append(rank.engine.links.staging.allocated_bytes)
        codec = make_codec(Code(8), torch.bfloat16, rank.job.block_numel)
        secondary_bytes = sum(
            backend.grid.ladder.link_ranks(Link.INTER) * codec.payload_bytes(unit.layout.slice_shape) for unit in rank.engine.units
        )
        rank.engine.close()
        return allocated, secondary_bytes

    for allocated, secondary_bytes in run_world((2, 2), program):
        # How many are on their way at once depends on the ranks' pace, so the last few buffers may come late.
        assert allocated[-1] - allocated[1] < secondary_bytes
