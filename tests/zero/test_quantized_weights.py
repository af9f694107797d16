from __future__ import annotations

import dataclasses
import threading
from collections import Counter

import pytest
import torch
from harness.block_numbers import after_blocks
from harness.codes import LinkBits, bits_of
from harness.seen_weights import WholeWorld, watch
from harness.small_engine import LEARNING_RATE, Job, ModelShape, Rank, RecordingLanes, random_pauses, train_world
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm import codecs
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import Code
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import POLICIES, Policy, with_quantized_weights, with_secondary_weights
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

QWZ = with_quantized_weights(POLICIES[3])
ROWS = {
    "stage 1": with_quantized_weights(POLICIES[1]),
    "stage 2": with_quantized_weights(POLICIES[2]),
    "stage 3": QWZ,
    "stage 3, 4 bits": with_quantized_weights(POLICIES[3], Code(4)),
    "stage 3, hpZ": with_secondary_weights(QWZ),
}
UNEQUAL = ModelShape(inner=(9, 50, 1))
Sight = tuple[str, str, Tensor]  # phase, unit, values


def _sights(world: tuple[int, int] | Grid, job: Job) -> list[list[list[Sight]]]:
    """By rank and step, everything its modules read."""

    def program(backend: VirtualBackend) -> list[list[Sight]]:
        rank = Rank(job, backend)
        by_step: list[list[Sight]] = []
        watch(rank, lambda phase, unit, values: by_step[-1].append((phase, unit, values.clone())))
        for step in range(job.steps):
            by_step.append([])
            rank.step(step)
        rank.engine.close()
        return by_step

    return run_world(world, program)


# ---- what is read


@pytest.mark.parametrize(
    "world, row, is_recomputed",
    [*(((2, 2), row, True) for row in ROWS), ((3, 1), "stage 3", False), ((1, 2), "stage 3, hpZ", False)],
    ids=str,
)
def test_forward_recomputation_and_backward_of_a_step_read_the_same_bits_on_every_rank(
    world: tuple[int, int], row: str, is_recomputed: bool
) -> None:
    job = Job(ROWS[row], torch.bfloat16, ModelShape((5, 17), is_recomputed=is_recomputed), steps=2, microbatches=2)
    by_rank = _sights(world, job)
    for step in range(job.steps):
        first: dict[str, Tensor] = {}
        phases = Counter()
        for sights in by_rank:
            for phase, unit, values in sights[step]:
                assert torch.equal(first.setdefault(unit, values), values), (unit, phase)
                phases[unit, phase] += 1
        ranks = len(by_rank)
        assert phases["block.1", "forward"] == 2 * ranks * (2 if is_recomputed else 1)
        assert phases["block.1", "backward"] >= 2 * ranks
        if step:
            assert not torch.equal(first["block.1"], by_rank[0][0][1][2])  # weights move


MIXED = {
    "8 8": LinkBits(8, 8),
    "4 4": LinkBits(4, 4),
    "8 between, 16 inside": LinkBits(8, 16),
    "4 between, 8 inside": LinkBits(4, 8),
    "16 between, 8 inside": LinkBits(16, 8),
    "16 between, 4 inside": LinkBits(16, 4),
}


KEEPS_AND_DTYPE = [(False, torch.bfloat16), (True, torch.float32), (False, torch.float16)]


# Every pair of bits in one dtype.
@pytest.mark.parametrize("bits, keeps_secondary, dtype", [(bits, *KEEPS_AND_DTYPE[index % 3]) for index, bits in enumerate(MIXED)], ids=str)
def test_modules_read_the_main_weights_as_the_codecs_of_both_links_leave_them(bits: str, keeps_secondary: bool, dtype: torch.dtype) -> None:
    policy = dataclasses.replace(POLICIES[3], weight_codes=MIXED[bits].codes())
    job = Job(with_secondary_weights(policy) if keeps_secondary else policy, dtype, steps=2, microbatches=2)
    _check_reads((3, 2) if bits == "4 between, 8 inside" else (2, 2), job)


@pytest.mark.parametrize(
    "bits, world",
    [
        *(("4 between, 8 inside", world) for world in ((1, 1), (1, 3), (3, 1), Grid(4, 4, 2))),
        *(("8 between, 16 inside", world) for world in ((1, 3), (3, 1))),
        ("8 8", Grid(4, 4, 1)),
    ],
    ids=str,
)
def test_a_link_of_one_rank_leaves_the_weights_to_the_other_links_codec(bits: str, world: tuple[int, int] | Grid) -> None:
    _check_reads(world, Job(dataclasses.replace(POLICIES[3], weight_codes=MIXED[bits].codes()), torch.bfloat16, steps=2))


def _check_reads(world: tuple[int, int] | Grid, job: Job) -> None:
    whole = WholeWorld(world.world_size if isinstance(world, Grid) else world[0] * world[1])
    looks: list[str] = []

    def program(backend: VirtualBackend) -> None:
        rank = Rank(job, backend)
        whole.join(rank)

        def check(phase: str, unit: str, values: Tensor) -> None:
            looks.append(phase)
            assert torch.equal(values, whole.working_weights(unit, bits_of(job.policy.weight_codes))), (phase, unit)

        watch(rank, check)
        for step in range(job.steps):
            rank.step(step)
        rank.engine.close()

    run_world(world, program)
    assert {"forward", "backward"} <= set(looks)


# ---- what they depend on


@pytest.mark.parametrize("row", ["stage 1", "stage 3, hpZ"])
def test_bits_do_not_depend_on_how_far_ahead_units_climb(row: str) -> None:
    job = Job(ROWS[row], torch.bfloat16, UNEQUAL, steps=2, microbatches=2)
    first, *others = (train_world((2, 2), dataclasses.replace(job, prefetch=Prefetch(*uses))) for uses in ((2, 1), (0, 0), (1, 4)))
    assert all(history == first for history in others)


@pytest.mark.parametrize("row", ["stage 1", "stage 3", "stage 3, hpZ"])
def test_bits_do_not_depend_on_random_delays_of_single_ranks(row: str) -> None:
    job = Job(ROWS[row], torch.bfloat16, UNEQUAL, steps=2, microbatches=2)
    delayed = run_world((2, 2), lambda backend: Rank(job, backend, RecordingLanes(random_pauses(backend.rank))).train(), takes_turns=False)
    assert delayed == train_world((2, 2), job)


def test_a_unit_reads_the_same_bits_whatever_other_units_the_model_has() -> None:
    few = _sights((2, 2), Job(QWZ, torch.bfloat16, ModelShape((17,)), steps=1))
    many = _sights((2, 2), Job(QWZ, torch.bfloat16, ModelShape((17, 3, 50), is_tied=False), steps=1, prefetch=Prefetch(4, 4)))
    read = [next(values for _, unit, values in by_rank[0][0] if unit == "block.0") for by_rank in (few, many)]
    assert torch.equal(*read)


def test_norm_gains_and_biases_are_not_quantized_and_matrices_are() -> None:
    sights = _sights((2, 2), Job(QWZ, torch.float32, steps=1))[0][0]
    exact = _sights((2, 2), Job(POLICIES[3], torch.float32, steps=1))[0][0]
    for (_, unit, got), (_, _, expected) in zip(sights, exact, strict=True):
        if unit == "final_norm":
            assert torch.equal(got, expected)
        else:
            assert not torch.equal(got, expected)
            torch.testing.assert_close(got, expected, rtol=0, atol=float(expected.abs().max()) / 254 * 1.001)


# ---- what they leave alone


@pytest.mark.parametrize("row, dtype", [(row, (torch.float32, torch.bfloat16)[index % 2]) for index, row in enumerate(ROWS)], ids=str)
def test_steps_of_learning_rate_zero_leave_the_main_weights_bit_for_bit(row: str, dtype: torch.dtype) -> None:
    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(ROWS[row], dtype), backend)
        before = [unit.main_weight.clone() for unit in rank.engine.units]
        for step in range(2):
            rank.accumulate(step)
            rank.engine.step(0.0)
        rank.engine.close()
        for unit, main_weight in zip(rank.engine.units, before, strict=True):
            assert torch.equal(unit.main_weight.view(torch.int32), main_weight.view(torch.int32))

    run_world((2, 2), program)


@pytest.mark.parametrize("row", ["stage 1", "stage 3", "stage 3, 4 bits", "stage 3, hpZ"])
def test_a_step_moves_the_main_weights_by_adam_and_by_nothing_else(row: str) -> None:
    def program(backend: VirtualBackend) -> float:
        rank = Rank(Job(ROWS[row], clip_grad=0.0), backend)
        lost = 0.0
        rank.accumulate(0)
        rank.engine.finish_gradients()
        before = [unit.main_weight.double() for unit in rank.engine.units]
        gradients = [torch.cat([part.flatten() for part in each.primary.parts()]).double() for each in rank.engine.gradients]
        rank.engine.step(LEARNING_RATE)
        for unit, main_weight, gradient in zip(rank.engine.units, before, gradients, strict=True):
            decays = torch.cat([torch.ones(unit.layout.slice_shape.blocks), torch.zeros(unit.layout.slice_shape.exact)]).double()
            expected = main_weight * (1 - LEARNING_RATE * 0.01 * decays) - LEARNING_RATE * gradient / (gradient.abs() + 1e-8)
            # AdamW in fp32 rounds a handful of times; next to eps a gradient's square root loses some more digits.
            torch.testing.assert_close(unit.main_weight.double(), expected, rtol=1e-6, atol=1e-5 * LEARNING_RATE)
            blocks = main_weight[: unit.layout.slice_shape.blocks].float()
            if len(blocks):
                lost = max(lost, float((blocks - after_blocks(blocks, bits_of(ROWS[row].weight_codes).inter, 32)).abs().max()))
        rank.engine.close()
        return lost

    assert all(lost > 1e-4 for lost in run_world((2, 2), program))  # an error that the tolerance above would show


# ---- how often they are encoded


# Every row with recomputation, which climbs most often; one without.
@pytest.mark.parametrize("row, is_recomputed", [*((row, True) for row in ROWS), ("stage 3", False)])
def test_each_slice_is_encoded_once_per_optimizer_step_however_often_it_climbs(
    monkeypatch: pytest.MonkeyPatch, row: str, is_recomputed: bool
) -> None:
    job = Job(ROWS[row], torch.bfloat16, ModelShape((9, 20), is_recomputed=is_recomputed), steps=2, microbatches=2)
    calls = _count_calls(monkeypatch, "encode_blocks")
    calls_of_recoding = _count_calls(monkeypatch, "recode_mean_blocks")

    def program(backend: VirtualBackend) -> list[int]:
        rank = Rank(job, backend)
        for step in range(job.steps):
            for microbatch in range(job.microbatches):
                with torch.no_grad():
                    rank.loss(90)
                loss = rank.loss(step, microbatch)
                with torch.no_grad():
                    rank.loss(91)
                rank.backward(loss, microbatch)
            rank.engine.step(LEARNING_RATE)
        with torch.no_grad():
            rank.loss(92)  # lets every unit climb with the weights of the last step, not only the first units
        rank.engine.close()
        return [unit.main_weight.data_ptr() for unit in rank.engine.units if unit.layout.slice_shape.blocks]

    units = [pointer for pointers in run_world((2, 2), program) for pointer in pointers]
    assert [calls[pointer] for pointer in units] == [job.steps + 1] * len(units)
    assert not calls_of_recoding


def _count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> Counter[int]:
    """How often an op of the codecs was called, by the address of its first argument."""
    calls: Counter[int] = Counter()
    lock = threading.Lock()
    op = getattr(codecs, name)

    def counting(first: Tensor, *args: object, **kwargs: object) -> None:
        with lock:
            calls[first.data_ptr()] += first.numel() > 0
        op(first, *args, **kwargs)

    monkeypatch.setattr(codecs, name, counting)
    return calls


@pytest.mark.parametrize("row", list(ROWS))
def test_a_skipped_step_encodes_nothing_again(monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    calls = _count_calls(monkeypatch, "encode_blocks")

    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(ROWS[row], torch.bfloat16), backend)
        for step in range(2):
            loss = rank.loss(step)
            rank.backward(loss * float("nan") if backend.rank == 1 else loss)
            assert rank.engine.step(LEARNING_RATE).is_skipped
        rank.engine.close()

    run_world((2, 2), program)
    assert sorted(calls.values(), reverse=True)[: 4 * 3] == [1] * 4 * 3 and calls.total() == 4 * 3  # embedding and two blocks on four ranks


# ---- worlds with one link or none


def test_one_rank_alone_quantizes_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for row, plain in (("stage 1", 1), ("stage 2", 2), ("stage 3", 3), ("stage 3, hpZ", 3)):
            assert train_world((1, 1), Job(ROWS[row], dtype)) == train_world((1, 1), Job(POLICIES[plain], dtype))


@pytest.mark.parametrize("world", [(1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("row", ["stage 1", "stage 3, hpZ"])
def test_one_link_alone_quantizes_and_the_run_still_learns(world: tuple[int, int], row: str) -> None:
    policy: Policy = ROWS[row]
    quantized = train_world(world, Job(policy, torch.bfloat16, steps=6))
    exact = train_world(world, Job(POLICIES[3], torch.bfloat16, steps=6))
    assert quantized != exact
    assert all(history[-1][0] < history[0][0] for history in quantized)
