"""What a step will move is known before any rank starts: the plan, the closed form and the engine agree."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from harness import closed_forms
from harness.closed_forms import INT4, INT8, Features, inter_node_bytes
from harness.planned_engine import ALL, KEPT, UNOFFERED, planned_step
from harness.small_engine import ROWS, Job, ModelShape, Rank, SmallModel
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import Code, LinkCodes
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.ops.planned import CodecWork
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Direction, Link
from megatron_zpp.training.plan.planned_step import plan_step
from megatron_zpp.training.plan.program import Booked, Submit
from megatron_zpp.training.sharding import grid_of
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.policy import (
    POLICIES,
    Policy,
    with_offloaded_optimizer,
    with_quantized_gradients,
    with_secondary_weights,
)
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

LEDGER = (Category.WEIGHTS, Category.GRADIENTS)
GPT_FLAGS = f"--num-layers {closed_forms.LAYERS} --hidden-size {closed_forms.HIDDEN} --num-attention-heads 4 --vocab-size 100 "
GPT_FLAGS += f"--seq-length {closed_forms.POSITIONS} --make-vocab-size-divisible-by 8 --quantization-block-size {closed_forms.BLOCK} --bf16"
SWITCHES = {
    "--zero-quantized-weights": {"weights": INT8},
    "--zero-hpz-partition-size {ranks_per_node}": {"keeps_secondary": True},
    "--zero-quantized-gradients": {"gradients": INT4},
}
EVERY_ROW = {
    **ROWS,
    **UNOFFERED,
    "qgZ": with_quantized_gradients(POLICIES[3]),
    "hpZ": with_secondary_weights(POLICIES[3]),
    "all": ALL,
    "offloaded stage 1": with_offloaded_optimizer(POLICIES[1]),
    "offloaded, all": with_offloaded_optimizer(ALL),
}


# ---- against closed forms


def planned_node_bytes(grid: Grid, flags: str, microbatches: int) -> int:
    batch = f"--global-batch-size {microbatches * grid.world_size}"
    config = resolve(parse_flags(f"{GPT_FLAGS} {batch} {flags}".split()), grid.world_size, grid.ranks_per_node)
    step = plan_step(config, grid_of(config, grid.world_size), closed_forms.VOCAB, is_on_gpu=False)
    return step.traffic(*LEDGER).inter_bytes * grid.ranks_per_node


# Each stage in two worlds, with another number of micro-batches, tied in one of them.
WORLDS = [Grid.of_nodes(2, 1), Grid.of_nodes(2, 2), Grid.of_nodes(3, 2), Grid.of_nodes(1, 3)]
CASES = [
    (WORLDS[(stage + turn) % 4], stage, (1, 2, 4)[(stage + turn) % 3], (stage + turn) % 2 == 0) for stage in range(4) for turn in (1, 2)
]


@pytest.mark.parametrize(("grid", "stage", "microbatches", "is_tied"), CASES, ids=str)
def test_the_plan_of_a_stage_is_its_closed_form(grid: Grid, stage: int, microbatches: int, is_tied: bool) -> None:
    flags = f"--zero-stage {stage}" + ("" if is_tied else " --untie-embeddings-and-output-weights")
    expected = inter_node_bytes(Features(stage), grid, microbatches=microbatches, element_bytes=2, is_tied=is_tied)
    assert planned_node_bytes(grid, flags, microbatches) == expected


@pytest.mark.parametrize("names", [names for count in range(1, 4) for names in itertools.combinations(SWITCHES, count)], ids=" ".join)
@pytest.mark.parametrize("grid", [Grid.of_nodes(2, 1), Grid.of_nodes(3, 2)], ids=str)
def test_the_plan_of_every_combination_is_its_closed_form(grid: Grid, names: tuple[str, ...]) -> None:
    flags = " ".join(["--zero-stage 3", *names]).format(ranks_per_node=grid.ranks_per_node)
    features = Features(**{key: value for name in names for key, value in SWITCHES[name].items()})
    if grid.ranks_per_node == 1:
        features = replace(features, keeps_secondary=False)  # a partition of one rank keeps nothing
    assert planned_node_bytes(grid, flags, 4) == inter_node_bytes(features, grid, microbatches=4, element_bytes=2)


# ---- against engines that move them

SHAPES = [ModelShape(), ModelShape(is_tied=False), ModelShape((5, 9, 17), is_recomputed=True, chunk=2)]
PREFETCHES = [Prefetch(), Prefetch(0, 0), Prefetch(9, 4)]
GRIDS = [Grid.of_nodes(2, 2), Grid.of_nodes(1, 3), Grid(8, 4, 2), Grid(4, 2, 1, tensor_ranks=2)]
WITH_PARTITIONS = ("secondary row", "hpZ", "all", "full gradients beside a secondary rung")
# Every row in a world of two by two, each with another model, number of micro-batches and prefetch, and some rows in the other worlds.
ROWS_IN_GRIDS = [
    *((row, GRIDS[0]) for row in EVERY_ROW),
    *((row, GRIDS[1 + index]) for index in (0, 2) for row in ("stage 0", "stage 3", "all")),
    *((row, GRIDS[2]) for row in WITH_PARTITIONS),
]
PAIRS = [
    (row, grid, SHAPES[index % 3], (1, 2, 4)[(index + index // 9) % 3], PREFETCHES[index // 3 % 3], bool(index % 2))
    for index, (row, grid) in enumerate(ROWS_IN_GRIDS)
]


@pytest.mark.parametrize(("row", "grid", "shape", "microbatches", "prefetch", "is_on_gpu"), PAIRS, ids=str)
def test_the_plan_is_what_the_engines_ledger_counts_over_both_links(
    row: str, grid: Grid, shape: ModelShape, microbatches: int, prefetch: Prefetch, is_on_gpu: bool
) -> None:
    job = Job(EVERY_ROW[row], torch.bfloat16, shape, steps=1, microbatches=microbatches, prefetch=prefetch)

    def counted(backend: VirtualBackend) -> list[Traffic]:
        rank = Rank(job, backend)
        rank.train()
        return [rank.ledger.total(category) for category in LEDGER]

    step = planned_step(job, grid, is_on_gpu=is_on_gpu)
    assert run_world(grid, counted) == [[step.traffic(category) for category in LEDGER]] * grid.world_size


@pytest.mark.parametrize("row", ["stage 1", "stage 3", "secondary row", "offloaded, all"])
def test_of_many_micro_batches_three_are_run_and_the_plan_is_that_of_all(row: str) -> None:
    job = Job(EVERY_ROW[row], torch.bfloat16, microbatches=5)
    few, all_of_them = planned_step(job, GRIDS[0]), planned_step(job, GRIDS[0], recorded=5)
    items = [item for segment in all_of_them.engine.segments for item in segment.items]
    assert {segment.microbatch for segment in all_of_them.engine.segments} == {*range(5), None}
    booked = [item.traffic for item in items if isinstance(item, Booked) and item.category in LEDGER]
    assert few.traffic(*LEDGER) == sum(booked, Traffic())
    assert few.collectives == sum(isinstance(item, Submit) and item.traffic != Traffic() for item in items)


# ---- rows that keep a copy of the weights across steps

BLOCK = 256
WIDE = ModelShape(inner=(40, 90, 90), hidden=24)  # more than one block of 256 in a slice


KEPT_GRIDS = [GRIDS[0], Grid.of_nodes(3, 2), GRIDS[2], GRIDS[0], Grid.of_nodes(1, 2), GRIDS[2]]


@pytest.mark.parametrize(("name", "grid"), list(zip(KEPT, KEPT_GRIDS, strict=True)), ids=str)
def test_the_plan_of_differences_is_what_a_step_after_the_first_moves(name: str, grid: Grid) -> None:
    job = Job(KEPT[name], torch.bfloat16, WIDE, steps=2, microbatches=3, block_numel=BLOCK)

    def moved(backend: VirtualBackend) -> list[Traffic]:
        rank, steps = Rank(job, backend), []
        for step in range(job.steps):
            before = rank.ledger.total(*LEDGER)
            rank.step(step)
            steps.append(rank.ledger.total(*LEDGER) - before)
        rank.engine.close()
        return steps

    expected = planned_step(job, grid).traffic(*LEDGER)
    for first, second in run_world(grid, moved):
        assert (first.inter_bytes, first.intra_bytes) >= (second.inter_bytes, second.intra_bytes)  # the first climb is exact
        assert second == expected


# ---- the codecs' work


def hops_of(policy: Policy, grid: Grid) -> tuple[int, list[Submit], list[Submit]]:
    """Values of a slice's blocks, the hops of the first climb and of the descent of one unit."""
    job = Job(policy, torch.bfloat16, WIDE, block_numel=BLOCK)
    hops = [item for item in planned_step(job, grid).items(1) if isinstance(item, Submit) and item.unit == "block.0"]
    climb, descent = ([hop for hop in hops if hop.lane.direction is direction] for direction in (Direction.CLIMB, Direction.DESCEND))
    spec = SmallModel(WIDE, torch.bfloat16).unit_specs()[1]
    return FlatLayout(spec.params, grid.data_ranks, BLOCK).slice_shape.blocks, climb[:2], descent


def test_a_difference_is_taken_and_encoded_once_and_every_slice_of_the_copy_is_decoded() -> None:
    blocks, climb, _ = hops_of(KEPT["lean stage 3"], Grid.of_nodes(3, 2))
    inter = next(hop for hop in climb if hop.lane.link is Link.INTER)
    intra = next(hop for hop in climb if hop.lane.link is Link.INTRA)
    assert inter.before == CodecWork(subtracted=blocks, gaussian_encoded=blocks, rotated=blocks)
    assert inter.after == CodecWork(gaussian_decoded=3 * blocks, rotated=3 * blocks)
    assert intra.before == intra.after == CodecWork()  # the copy crosses in the working dtype


def test_every_node_rotates_its_gradients_and_the_owner_rotates_each_message_back() -> None:
    two_rounds = with_quantized_gradients(POLICIES[3], LinkCodes(Code.gaussian(2, rounds=2), Code(8)))
    blocks, _, (intra, inter) = hops_of(two_rounds, Grid.of_nodes(3, 2))
    assert intra.before == CodecWork(encoded=6 * blocks)
    assert inter.before == CodecWork(summed=6 * blocks, gaussian_encoded=3 * blocks, rotated=6 * blocks)
    assert inter.after == CodecWork(gaussian_decoded=3 * blocks, rotated=6 * blocks)


@pytest.mark.parametrize(
    ("policy", "grid"), [(KEPT["lean stage 3"], Grid.of_nodes(1, 2)), (POLICIES[3], Grid.of_nodes(3, 2))], ids=["1 node", "plain"]
)
def test_one_node_takes_no_difference_and_sends_integers_and_a_plain_row_encodes_nothing(policy: Policy, grid: Grid) -> None:
    _, climb, descent = hops_of(policy, grid)
    work = [hop.before + hop.after for hop in (*climb, *descent)]
    assert sum(part.gaussian_encoded + part.gaussian_decoded + part.rotated + part.subtracted for part in work) == 0
    assert all(hop.before + hop.after == CodecWork() for hop in climb)
    assert (sum(part.encoded for part in work) > 0) == (grid.nodes == 1)


def test_a_step_in_full_precision_takes_encodes_and_rotates_nothing() -> None:
    _, climb, descent = hops_of(KEPT["lean stage 3"].in_full_precision(), Grid.of_nodes(3, 2))
    assert all(hop.before + hop.after == CodecWork() for hop in (*climb, *descent))
