"""What a step will move is known before any rank starts: the plan, the closed form and the engine agree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from harness import closed_forms
from harness.closed_forms import Features, World, inter_node_bytes
from harness.small_engine import ROWS, Job, ModelShape, Rank, SmallModel
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.model.shapes import ModelShape as GptShape
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Lane
from megatron_zpp.training.sharding import grid_of, sharding_of
from megatron_zpp.zero.plan.memory_plan import Sharding
from megatron_zpp.zero.plan.planned_hops import PlannedHop
from megatron_zpp.zero.plan.step_simulation import StepSimulation
from megatron_zpp.zero.plan.traffic import planned_traffic, smallest_inter_hop_bytes
from megatron_zpp.zero.policy import (
    POLICIES,
    Policy,
    with_offloaded_optimizer,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
)
from megatron_zpp.zero.schedule import Prefetch
from megatron_zpp.zero.update import Update

pytestmark = pytest.mark.virtual

GPT_FLAGS = f"--num-layers {closed_forms.LAYERS} --hidden-size {closed_forms.HIDDEN} --num-attention-heads 4 --vocab-size 100 "
GPT_FLAGS += f"--seq-length {closed_forms.POSITIONS} --make-vocab-size-divisible-by 8 --quantization-block-size {closed_forms.BLOCK} --bf16"
SWITCHES = {
    "--zero-quantized-weights": {"weight_bits": 8},
    "--zero-hpz-partition-size {ranks_per_node}": {"keeps_secondary": True},
    "--zero-quantized-gradients": {"gradient_bits": 4},
}
ALL = with_quantized_gradients(with_secondary_weights(with_quantized_weights(POLICIES[3])))
EVERY_ROW = {**ROWS, "qgZ": with_quantized_gradients(POLICIES[3]), "hpZ": with_secondary_weights(POLICIES[3]), "all": ALL}
OFFLOADED = {"offloaded stage 1": with_offloaded_optimizer(POLICIES[1]), "offloaded, all": with_offloaded_optimizer(ALL)}


def planned_node_bytes(world: World, flags: str, microbatches: int) -> int:
    batch = f"--global-batch-size {microbatches * world.size}"
    config = resolve(parse_flags(f"{GPT_FLAGS} {batch} {flags}".split()), world.size, world.ranks_per_node)
    model = GptShape(config.model, closed_forms.VOCAB)
    grid = grid_of(config, world.size)
    traffic = planned_traffic(model.unit_specs(), model.uses(), sharding_of(config), grid, microbatches)
    return traffic.total.inter_bytes * world.ranks_per_node


@pytest.mark.parametrize("world", [World(2, 1), World(2, 2), World(3, 2), World(1, 3)], ids=str)
def test_the_plan_is_the_closed_form_of_every_stage_and_combination(world: World) -> None:
    for stage, microbatches, is_tied in itertools.product(range(4), (1, 2, 5), (True, False)):
        flags = f"--zero-stage {stage}" + ("" if is_tied else " --untie-embeddings-and-output-weights")
        expected = inter_node_bytes(world, stage, microbatches=microbatches, element_bytes=2, is_tied=is_tied)
        assert planned_node_bytes(world, flags, microbatches) == expected
    for names in (names for count in range(1, 4) for names in itertools.combinations(SWITCHES, count)):
        flags = " ".join(["--zero-stage 3", *names]).format(ranks_per_node=world.ranks_per_node)
        features = Features(**{key: value for name in names for key, value in SWITCHES[name].items()})
        if world.ranks_per_node == 1:
            features = replace(features, keeps_secondary=False)  # a partition of one rank keeps nothing
        expected = inter_node_bytes(world, 3, microbatches=4, element_bytes=2, features=features)
        assert planned_node_bytes(world, flags, 4) == expected


def sharding(job: Job) -> Sharding:
    return Sharding(job.policy, job.block_numel, job.dtype.itemsize, job.prefetch)


OTHER_GRIDS = [Grid.of_nodes(1, 3), Grid(8, 4, 2), Grid(4, 2, 1, tensor_ranks=2)]


# Every row in a world of two by two, and in one of the others.
@pytest.mark.parametrize(
    "row, grid",
    [(row, grid) for index, row in enumerate(EVERY_ROW) for grid in (Grid.of_nodes(2, 2), OTHER_GRIDS[index % len(OTHER_GRIDS)])],
    ids=str,
)
def test_the_plan_is_what_the_engines_ledger_counts_over_both_links(grid: Grid, row: str) -> None:
    job = Job(EVERY_ROW[row], torch.bfloat16, steps=1, microbatches=2)
    model = SmallModel(job.shape, job.dtype)

    def counted(backend: VirtualBackend) -> tuple[Traffic, Traffic]:
        rank = Rank(job, backend)
        rank.train()
        return rank.ledger.total(Category.WEIGHTS), rank.ledger.total(Category.GRADIENTS)

    plan = planned_traffic(model.unit_specs(), model.uses(), sharding(job), grid, job.microbatches)
    assert run_world(grid, counted) == [(plan.weights, plan.gradients)] * grid.world_size


@pytest.mark.parametrize("grid", [Grid.of_nodes(2, 2), Grid(8, 4, 2), Grid.of_nodes(1, 1)], ids=str)
def test_of_many_micro_batches_three_are_simulated_and_the_plan_is_that_of_all(grid: Grid) -> None:
    rows = list((EVERY_ROW | OFFLOADED).values())
    for policy, shape, prefetch in zip(rows, itertools.cycle(SHAPES), itertools.cycle([Prefetch(), Prefetch(0, 0), Prefetch(9, 4)])):
        model, all_of_them = SmallModel(shape, torch.bfloat16), Recorder()
        description = (model.unit_specs(), model.uses(), Sharding(policy, 32, 2, prefetch), grid)
        StepSimulation(*description, all_of_them).step(7)
        plan = planned_traffic(*description, 7)
        assert plan.total == sum(all_of_them.traffic, Traffic())
        assert plan.collectives == len(all_of_them.traffic) - all_of_them.traffic.count(Traffic())


@dataclass
class Recorder:
    """A listener that remembers every submission, and every update on the host by its number of elements."""

    submissions: list[tuple[str, Lane] | int] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)

    def submit(self, hop: PlannedHop, after: int | None) -> int:
        self.submissions.append((hop.unit, hop.lane))
        self.traffic.append(hop.traffic)
        return len(self.submissions)

    def wait(self, ticket: int) -> None:
        assert 0 < ticket <= len(self.submissions)

    def compute(self, use: int, *, is_backward: bool) -> None:
        return None

    def read_norm(self) -> None:
        return None

    def update_on_host(self, numel: int, coming: Sequence[int]) -> None:
        self.submissions.append(numel)


SHAPES = [ModelShape(), ModelShape(is_tied=False), ModelShape((5, 9, 17), is_recomputed=True, chunk=2)]


def note_updates(rank: Rank) -> None:
    """Adds the updates of the rank to its submissions."""
    optimizer, groups = rank.engine.optimizer, rank.engine._update_groups
    update = optimizer.update

    def noted(group: int, step: Update) -> None:
        rank.lanes.submissions.append(sum(rank.engine.units[index].layout.slice_numel for index in groups[group]))
        update(group, step)

    optimizer.update = noted  # type: ignore[method-assign]


# Every row with two of the models, one of them with several micro-batches.
@pytest.mark.parametrize(
    "row, shape, microbatches",
    [(row, SHAPES[(index + turn) % 3], (1, 3)[turn]) for index, row in enumerate(EVERY_ROW | OFFLOADED) for turn in (0, 1)],
    ids=str,
)
def test_a_walk_submits_what_the_engine_submits_in_its_order(row: str, shape: ModelShape, microbatches: int) -> None:
    policy: Policy = (EVERY_ROW | OFFLOADED)[row]
    job = Job(policy, shape=shape, steps=2, microbatches=microbatches, prefetch=Prefetch(2, 1))
    grid = Grid.of_nodes(2, 2)

    def submitted(backend: VirtualBackend) -> list[tuple[str, Lane] | int]:
        rank = Rank(job, backend)
        if row in OFFLOADED:
            note_updates(rank)
        for step in range(job.steps):
            rank.step(step)
        found = list(rank.lanes.submissions)
        rank.engine.close()
        return found

    recorder = Recorder()
    model = SmallModel(job.shape, job.dtype)
    simulation = StepSimulation(model.unit_specs(), model.uses(), sharding(job), grid, recorder)
    for _ in range(job.steps):
        simulation.step(microbatches, submits_next_climbs=True)
    assert run_world(grid, submitted) == [recorder.submissions] * grid.world_size


def test_the_smallest_hop_is_the_integer_gradient_of_the_smallest_unit_that_matters() -> None:
    config = resolve(parse_flags(f"{GPT_FLAGS} --zero-stage 3 --zero-quantized-gradients".split()), 4, 2)
    model, grid = GptShape(config.model, closed_forms.VOCAB), Grid.of_nodes(2, 2)
    embedding = closed_forms.units(is_tied=True)[0]
    payload = closed_forms.payload_bytes(embedding, 4, 4, 2)
    assert smallest_inter_hop_bytes(model.unit_specs(), sharding_of(config), grid, least_share=0.05) == 2 * payload
