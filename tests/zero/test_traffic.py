"""Bytes are promises: what the ledger of a step has is the closed form, to the byte."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from harness.closed_forms import INT4, INT8, Features, Unit, payload_bytes, small_units, step_bytes
from harness.codes import LinkBits
from harness.matrix_model import BLOCK as MATRIX_BLOCK
from harness.matrix_model import PARAMETERS, WORLD, MatrixRank
from harness.small_engine import VOCAB, Job, ModelShape, Rank, bytes_by_step
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.parallel.grid import Grid

pytestmark = pytest.mark.virtual

BLOCK = 32
INNER, HIDDEN = (5, 40), 6
WORLDS = [(nodes, ranks) for nodes, ranks in itertools.product(range(1, 5), range(1, 5)) if nodes * ranks <= 8]
PROMISED = [(2, 2), (2, 4), (4, 2), (3, 2)]

ROWS = {
    **{f"stage {stage}": Features(stage) for stage in range(4)},
    "secondary row": Features(keeps_secondary=True, sums_on_secondary=True),
}
COMBINATIONS = {
    "ZeRO-3": Features(),
    "qwZ": Features(weights=INT8),
    "hpZ": Features(keeps_secondary=True),
    "qgZ": Features(gradients=INT4),
    "qwZ+hpZ": Features(keeps_secondary=True, weights=INT8),
    "qwZ+qgZ": Features(weights=INT8, gradients=INT4),
    "hpZ+qgZ": Features(keeps_secondary=True, gradients=INT4),
    "all": Features(keeps_secondary=True, weights=INT8, gradients=INT4),
}
LOWER_STAGES = {
    f"stage {stage} {name}": dataclasses.replace(COMBINATIONS[name], stage=stage) for stage in (1, 2) for name in ("qwZ", "qgZ", "qwZ+qgZ")
}
OTHER_BITS = {
    "4-bit weights": Features(weights=INT4),
    "4-bit weights, hpZ": Features(keeps_secondary=True, weights=INT4),
    "weights 8 between, 16 inside": Features(weights=LinkBits(8, 16)),
    "weights 4 between, 8 inside, hpZ": Features(keeps_secondary=True, weights=LinkBits(4, 8)),
    "8-bit gradients": Features(gradients=INT8),
    "gradients 4 between, 8 inside": Features(gradients=LinkBits(4, 8)),
    "gradients 4 between, 16 inside": Features(gradients=LinkBits(4, 16)),
    "gradients 16 between, 4 inside": Features(gradients=LinkBits(16, 4)),
}


def _units(is_tied: bool = True) -> list[Unit]:
    return small_units(INNER, HIDDEN, VOCAB, is_tied=is_tied, block=BLOCK)


def _job(features: Features, dtype: torch.dtype, is_tied: bool = True, microbatches: int = 1, steps: int = 1) -> Job:
    shape = ModelShape(INNER, HIDDEN, is_tied)
    return Job(features.policy(), dtype, shape, steps=steps, microbatches=microbatches, block_numel=BLOCK)


def _check(
    features: Features, grid: Grid, dtype: torch.dtype, microbatches: int, is_tied: bool = True, steps: int = 1, evaluations: int = 0
) -> None:
    expected = step_bytes(features, _units(is_tied), grid, microbatches=microbatches, element_bytes=dtype.itemsize)
    job = _job(features, dtype, is_tied, microbatches, steps)
    assert bytes_by_step(grid, job, evaluations) == [[expected] * steps] * grid.world_size


# ---- the stages

VARIANTS = [(torch.float32, True, 1), (torch.bfloat16, True, 3), (torch.bfloat16, False, 3), (torch.float32, False, 1)]


# Every row in three worlds and with two variants; more worlds with codes below.
@pytest.mark.parametrize(
    "row, shape, variant",
    [
        (row, shape, (index + turn) % 4)
        for index, row in enumerate(ROWS)
        for turn, shape in enumerate([(2, 2), (3, 2), [(1, 3), (3, 1), (1, 1)][index % 3]])
    ],
    ids=str,
)
def test_the_ledger_equals_the_closed_form_to_the_byte(shape: tuple[int, int], row: str, variant: int) -> None:
    dtype, is_tied, microbatches = VARIANTS[variant]
    _check(ROWS[row], Grid.of_nodes(*shape), dtype, microbatches, is_tied)


def test_the_ledger_equals_the_closed_form_in_a_larger_world() -> None:
    _check(Features(), Grid.of_nodes(3, 4), torch.bfloat16, microbatches=1)


@pytest.mark.parametrize("is_tied, chunk", [(False, 1), (True, 2)])
def test_recomputation_moves_no_byte_more(is_tied: bool, chunk: int) -> None:
    job = _job(Features(), torch.float32, microbatches=2, steps=2)
    job = dataclasses.replace(job, shape=ModelShape(INNER, HIDDEN, is_tied, is_recomputed=True, chunk=chunk))
    expected = step_bytes(Features(), _units(is_tied), Grid.of_nodes(2, 2), microbatches=2, element_bytes=4)
    assert bytes_by_step((2, 2), job) == [[expected] * 2] * 4


@pytest.mark.parametrize("row", ["stage 0", "stage 3"])
def test_every_step_moves_the_same_bytes_and_evaluations_between_steps_are_booked_to_their_own_category(row: str) -> None:
    for evaluations in (0, 2):
        _check(ROWS[row], Grid.of_nodes(2, 2), torch.float32, microbatches=2, steps=2, evaluations=evaluations)


@pytest.mark.parametrize("row", ["stage 1", "stage 2", "secondary row"])
def test_climbs_that_serve_a_whole_step_are_booked_to_it_also_where_an_evaluation_was_the_first_to_wait(row: str) -> None:
    _check(ROWS[row], Grid.of_nodes(2, 2), torch.float32, microbatches=2, steps=3, evaluations=2)


# How often a unit climbs over the inter and the intra link: for every micro-batch that is evaluated (a tied embedding twice, because the
# last use reads it again), and for the first one after a step, to the rung that the next step keeps, to which these bytes are booked.
OWN_CLIMBS = {"stage 0": (0, 0), "stage 1": (0, 0), "stage 2": (0, 0), "stage 3": (1, 1), "secondary row": (0, 1)}
STEP_CLIMBS = {"stage 0": (0, 0), "stage 1": (1, 1), "stage 2": (1, 1), "stage 3": (0, 0), "secondary row": (1, 0)}


@pytest.mark.parametrize("row, shape", [*((row, (2, 2)) for row in ROWS), ("stage 3", (3, 2)), ("secondary row", (3, 2))], ids=str)
def test_evaluations_between_steps_and_at_the_end_receive_the_bytes_of_the_closed_form(row: str, shape: tuple[int, int]) -> None:
    (nodes, ranks), steps, evaluated, is_tied = shape, 2, 3, shape == (2, 2)
    job = _job(ROWS[row], torch.bfloat16, is_tied, microbatches=2, steps=steps)
    units, grid = _units(is_tied), Grid.of_nodes(*shape)
    payloads = [payload_bytes(unit, nodes * ranks, 16, 2) for unit in units]
    once = [(nodes - 1) * sum(payloads), (ranks - 1) * nodes * sum(payloads)]  # over the inter link and the intra link, into one rank
    again = [(nodes - 1) * payloads[0] * is_tied, (ranks - 1) * nodes * payloads[0] * is_tied]
    own = [climbs * (first + second) for climbs, first, second in zip(OWN_CLIMBS[row], once, again, strict=True)]
    node_bytes, within = step_bytes(ROWS[row], units, grid, microbatches=2, element_bytes=2)
    of_step = [node_bytes // ranks, within]
    at_the_end = [climbs * nbytes for climbs, nbytes in zip(STEP_CLIMBS[row], once, strict=True)]

    def program(backend: VirtualBackend) -> tuple[Traffic, Traffic]:
        rank = Rank(job, backend)
        for step in range(steps):
            rank.step(step)
            with torch.no_grad():
                for number in range(evaluated):
                    rank.loss(50 + number)
        rank.engine.close()
        return rank.ledger.total(Category.WEIGHTS, Category.GRADIENTS), rank.ledger.total(Category.EVALUATION)

    trained = Traffic(*(steps * nbytes + more for nbytes, more in zip(of_step, at_the_end, strict=True)))
    assert run_world(shape, program) == [(trained, Traffic(*own) * (steps * evaluated))] * (nodes * ranks)


def test_the_closed_form_is_the_rounded_table_of_the_family_for_a_model_without_padding() -> None:
    unit = Unit((1024, 512), 128, 2, block=4)
    m_bytes = 2 * (1024 + 512 + 128)
    share = {
        row: step_bytes(ROWS[row], [unit], Grid.of_nodes(4, 4), microbatches=4, element_bytes=2)[0] / (m_bytes * 3 / 4) for row in ROWS
    }
    assert share["stage 0"] == 3 and share["stage 1"] == 2 and share["stage 2"] == 5 and share["stage 3"] == 12


# ---- ZeRO++


# Every combination with three micro-batches, and every promised world.
@pytest.mark.parametrize(
    "world, name, microbatches", [(PROMISED[index % len(PROMISED)], name, 3) for index, name in enumerate(COMBINATIONS)], ids=str
)
def test_each_combination_moves_the_bytes_of_the_closed_form(world: tuple[int, int], name: str, microbatches: int) -> None:
    _check(COMBINATIONS[name], Grid.of_nodes(*world), torch.bfloat16, microbatches)


@pytest.mark.parametrize("world", [world for world in WORLDS if world not in PROMISED], ids=str)
def test_the_bytes_of_other_worlds_are_those_of_the_closed_form_too(world: tuple[int, int]) -> None:
    turn = 3 * world[0] + 5 * world[1]
    name = list(COMBINATIONS)[turn % len(COMBINATIONS)]
    dtype = [torch.float32, torch.bfloat16][turn % 2]
    _check(COMBINATIONS[name], Grid.of_nodes(*world), dtype, microbatches=1 + turn % 2, is_tied=turn % 4 < 2)


# All in a world with two links; with one, those whose links differ, and one of each kind.
@pytest.mark.parametrize(
    "world, name",
    [
        *(((2, 2), name) for name in (*LOWER_STAGES, *OTHER_BITS)),
        *(((1, 3), name) for name in ("weights 8 between, 16 inside", "gradients 4 between, 8 inside", "gradients 16 between, 4 inside")),
        *(((3, 1), name) for name in ("weights 4 between, 8 inside, hpZ", "gradients 4 between, 16 inside", "stage 1 qwZ+qgZ")),
    ],
    ids=str,
)
def test_lower_stages_and_other_bits_move_the_bytes_of_the_closed_form(world: tuple[int, int], name: str) -> None:
    _check({**LOWER_STAGES, **OTHER_BITS}[name], Grid.of_nodes(*world), torch.bfloat16, microbatches=2)


@pytest.mark.parametrize("partition, name", [(1, "all"), *((2, name) for name in ("ZeRO-3", "hpZ", "qwZ+qgZ", "all"))])
def test_partitions_smaller_than_a_node_move_the_bytes_of_the_closed_form(partition: int, name: str) -> None:
    _check(COMBINATIONS[name], Grid(8, ranks_per_node=4, partition_ranks=partition), torch.bfloat16, microbatches=2)


@pytest.mark.parametrize("name", ["qwZ", "all"])
def test_every_step_moves_the_same_bytes(name: str) -> None:
    _check(COMBINATIONS[name], Grid.of_nodes(2, 2), torch.bfloat16, microbatches=2, steps=3)


# ---- lean


WIDE_INNER, WIDE = (400,), 24  # slices of many blocks of 256 values, so that the bytes of scales are more than their padding


def _lean(stage: int, bits: int = 3, *, sums_on_secondary: bool = False) -> Features:
    return Features(stage, stage == 3, sums_on_secondary, LinkBits(bits, 16), LinkBits(3, 8), is_lean=True)


@pytest.mark.parametrize(
    "grid, features, microbatches",
    [
        (Grid.of_nodes(2, 2), _lean(3), 1),
        (Grid.of_nodes(2, 2), _lean(3, sums_on_secondary=True), 2),
        pytest.param(Grid.of_nodes(2, 2), _lean(3, bits=1), 4, marks=pytest.mark.long),
        pytest.param(Grid.of_nodes(3, 2), _lean(3, sums_on_secondary=True), 8, marks=pytest.mark.long),
        (Grid.of_nodes(2, 2), _lean(1, bits=2), 2),
        (Grid.of_nodes(3, 1), _lean(2, bits=4), 3),
        pytest.param(Grid(8, 4, 2), _lean(3), 1, marks=pytest.mark.long),
        (Grid(4, 2, 1), _lean(3, sums_on_secondary=True), 2),
        (Grid.of_nodes(1, 4), _lean(3, sums_on_secondary=True), 2),
    ],
    ids=str,
)
def test_each_step_of_lean_after_the_first_moves_the_bytes_of_the_closed_form(grid: Grid, features: Features, microbatches: int) -> None:
    shape, steps = ModelShape(WIDE_INNER, WIDE, is_tied=False), 3 if microbatches == 1 else 2
    job = Job(features.policy(), torch.bfloat16, shape, steps=steps, microbatches=microbatches, block_numel=MATRIX_BLOCK)
    units = small_units(WIDE_INNER, WIDE, VOCAB, is_tied=False, block=MATRIX_BLOCK)
    expected = step_bytes(features, units, grid, microbatches=microbatches, element_bytes=2)
    found = bytes_by_step(grid, job, evaluations=1)
    assert {of_step for of_rank in found for of_step in of_rank[1:]} == {expected}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_without_padding_and_vectors_a_step_moves_less_than_0_385_of_the_model(microbatches: int) -> None:
    def program(backend: VirtualBackend) -> float:
        rank = MatrixRank(_lean(3, sums_on_secondary=True).policy(), backend)
        moved = 0
        for _ in range(2):
            before = moved
            rank.accumulate(microbatches)
            rank.engine.step(1e-3)
            moved = rank.ledger.inter_node_bytes(rank.ledger.total(Category.WEIGHTS, Category.GRADIENTS))
        numel = sum(unit.layout.numel for unit in rank.engine.units)
        rank.engine.close()
        return (moved - before) / (2 * numel)

    nodes = WORLD[0]
    for share in run_world(WORLD, program):
        assert share == (2 * 3 / 16 + 2 * 16 / (256 * 16)) * (nodes - 1) / nodes <= 0.385 * (nodes - 1) / nodes


# ---- the table of the design


@pytest.mark.parametrize("name, microbatches", [(name, (1, 4)[index % 2]) for index, name in enumerate(COMBINATIONS)], ids=str)
def test_without_padding_bytes_between_nodes_are_those_of_the_table_plus_the_scales(name: str, microbatches: int) -> None:
    def program(backend: VirtualBackend) -> tuple[int, int]:
        rank = MatrixRank(COMBINATIONS[name].policy(), backend)
        rank.accumulate(microbatches)
        rank.engine.step(1e-3)
        rank.engine.close()
        return tuple(rank.ledger.inter_node_bytes(rank.ledger.total(each)) for each in (Category.WEIGHTS, Category.GRADIENTS))  # type: ignore[return-value]

    k = microbatches
    table = {
        "ZeRO-3": 3 * k,
        "qwZ": 2 * k,
        "hpZ": 1 + k,
        "qgZ": 2.25 * k,
        "qwZ+hpZ": 0.5 + k,
        "qwZ+qgZ": 1.25 * k,
        "hpZ+qgZ": 1 + 0.25 * k,
        "all": 0.5 + 0.25 * k,
    }
    unit_bytes = 2 * PARAMETERS * (WORLD[0] - 1) / WORLD[0]
    features = COMBINATIONS[name]
    coded_weights, coded_gradients = features.weights == INT8, features.gradients == INT4
    scales = {True: 4 / MATRIX_BLOCK, False: 0.0}  # bytes per parameter
    crossings = 1 if features.keeps_secondary else 2 * k
    extra = (crossings * scales[coded_weights] + k * scales[coded_gradients]) / 2
    for weights, gradients in run_world(WORLD, program):
        assert (weights + gradients) / unit_bytes == table[name] + extra
        assert weights / unit_bytes == crossings * ((1 if coded_weights else 2) + scales[coded_weights]) / 2
        assert crossings * scales[coded_weights] / 2 <= 0.016 * weights / unit_bytes
        assert k * scales[coded_gradients] / 2 <= 0.032 * gradients / unit_bytes
