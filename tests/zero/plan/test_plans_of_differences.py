"""Plans of rows that keep a copy of the weights across steps, against engines that do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from harness.small_engine import LEARNING_RATE, Job, ModelShape, Rank, SmallModel
from harness.worlds import run_world
from megatron_zpp.zero.plan.memory_plan import MemoryPlan, Sharding, plan_memory
from megatron_zpp.zero.plan.planned_hops import CodecWork, PlannedHop, UnitHops
from megatron_zpp.zero.plan.step_simulation import StepSimulation
from megatron_zpp.zero.plan.traffic import planned_traffic

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import Code, LinkCodes
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Lane, Topology
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.policy import (
    POLICIES,
    Policy,
    with_gradients_summed_on_secondary,
    with_quantized_gradients,
    with_secondary_weights,
    with_weight_differences,
)
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

BLOCK = 256
GAUSSIAN_GRADIENTS = LinkCodes(Code.gaussian(3, rounds=1), Code(8))
WIDE = ModelShape(inner=(40, 90, 90), hidden=24)  # more than one block of 256 in a slice


def lean(policy: Policy, bits: int = 3) -> Policy:
    return with_quantized_gradients(with_weight_differences(policy, Code.gaussian(bits, rounds=1)), GAUSSIAN_GRADIENTS)


KEPT = {
    "stage 1": lean(POLICIES[1]),
    "stage 2": lean(POLICIES[2], bits=1),
    "stage 2, summed": with_gradients_summed_on_secondary(lean(POLICIES[2])),
    "stage 3": lean(with_secondary_weights(POLICIES[3])),
    "stage 3, summed": with_gradients_summed_on_secondary(lean(with_secondary_weights(POLICIES[3]), bits=2)),
    "absmax": with_weight_differences(with_secondary_weights(POLICIES[3]), Code(4)),
}
GRIDS = [Grid.of_nodes(2, 2), Grid.of_nodes(3, 2), Grid.of_nodes(1, 2), Grid(8, 4, 2)]
PAIRS = [
    *((name, GRIDS[place]) for name, place in zip(KEPT, (0, 1, 0, 3, 0, 1), strict=True)),
    ("stage 2, summed", GRIDS[2]),
    *(pytest.param(name, GRIDS[(index + 1) % 4], marks=pytest.mark.long) for index, name in enumerate(KEPT)),
]


def job_of(name: str) -> Job:
    return Job(KEPT[name], torch.bfloat16, WIDE, steps=2, microbatches=3, block_numel=BLOCK)


@dataclass(frozen=True)
class Found:
    """What the engine of one rank had and did. states, moved (into the node, and from ranks of the own node): bytes of each step."""

    states: list[int]
    moved: list[tuple[int, int]]
    submissions: list[tuple[str, Lane]]


@cache
def trained(name: str, grid: Grid, saves: bool = False) -> list[Found]:
    """By rank. saves: after the first step there is a save."""

    def program(backend: VirtualBackend) -> Found:
        rank, before = Rank(job_of(name), backend), Traffic()
        found = Found([], [], rank.lanes.submissions)
        for step in range(rank.job.steps):
            rank.accumulate(step)
            rank.engine.finish_gradients()
            found.states.append(rank.engine.state_bytes().device)
            rank.engine.step(LEARNING_RATE)
            total = rank.ledger.total(Category.WEIGHTS, Category.GRADIENTS)
            found.moved.append((rank.ledger.inter_node_bytes(total - before), (total - before).intra_bytes))
            before = total
            if saves and step == 0:
                rank.engine.finish_differences()
        rank.engine.close()
        return found

    return run_world(grid, program)


def sharding_of(job: Job) -> Sharding:
    return Sharding(job.policy, job.block_numel, job.dtype.itemsize, job.prefetch)


def plan_of(job: Job, topology: Topology) -> MemoryPlan:
    model = SmallModel(job.shape, job.dtype)
    return plan_memory(model.unit_specs(), model.uses(), sharding_of(job), topology)


@pytest.mark.parametrize("name, grid", PAIRS, ids=str)
def test_planned_states_are_what_the_engine_reports_to_the_byte(name: str, grid: Grid) -> None:
    assert [found.states for found in trained(name, grid)] == [[plan_of(job_of(name), grid.ladder).states] * 2] * grid.world_size


@pytest.mark.parametrize(
    "name, prefetch", [(name, Prefetch(2, 1) if index % 2 else Prefetch(0, 0)) for index, name in enumerate(KEPT)], ids=str
)
def test_planned_buffers_hold_every_payload_on_its_way(name: str, prefetch: Prefetch) -> None:
    job = Job(KEPT[name], shape=ModelShape(inner=(40,) * 6, hidden=24), microbatches=2, block_numel=BLOCK, prefetch=prefetch)

    def staged(backend: VirtualBackend) -> int:
        rank = Rank(job, backend)
        for step in range(3):
            rank.accumulate(step)
            rank.engine.finish_gradients()
            rank.engine.step(0.1)
            if step == 1:
                rank.engine.finish_differences()
        rank.engine.close()
        return rank.engine.ladder.staging.allocated_bytes

    grid = Grid.of_nodes(2, 2)
    assert max(run_world(grid, staged)) <= plan_of(job, grid.ladder).buffers


def test_the_copy_takes_2_bytes_per_parameter_of_a_partition_and_sums_inside_it_4() -> None:
    topology = Topology(8, 4, 4)
    plain, once, summed = (
        plan_of(Job(policy, torch.bfloat16, WIDE, block_numel=BLOCK), topology)
        for policy in (POLICIES[3], KEPT["stage 3"], KEPT["stage 3, summed"])
    )
    numel = plain.gradients // 4 * topology.data_ranks  # with padding
    assert (plain.secondary, once.secondary, summed.secondary) == (0, 2 * numel // 4, 2 * numel // 4)
    assert (once.gradients, summed.gradients) == (4 * numel // 8, 4 * numel // 4)


def test_a_run_that_starts_in_full_precision_has_the_same_states() -> None:
    kept = KEPT["stage 3"]
    plans = [
        plan_of(Job(policy, torch.bfloat16, WIDE, block_numel=BLOCK), Topology(4, 2, 2)) for policy in (kept, kept.in_full_precision())
    ]
    assert plans[0].states == plans[1].states


# ---- bytes and the order of hops


@pytest.mark.parametrize("name, grid", PAIRS, ids=str)
def test_planned_traffic_is_what_a_step_after_the_first_moves(name: str, grid: Grid) -> None:
    job = job_of(name)
    model = SmallModel(job.shape, job.dtype)
    total = planned_traffic(model.unit_specs(), model.uses(), sharding_of(job), grid, job.microbatches).total
    expected = (grid.into_node(total.inter_bytes), total.intra_bytes)
    for found in trained(name, grid):
        first, second = found.moved
        assert first >= second == expected  # its climb is exact


@pytest.mark.parametrize("name", ["stage 1", "stage 2, summed", "stage 3"])
def test_what_a_save_fetches_counts_in_the_step_after_it_which_then_need_not(name: str) -> None:
    with_save, without = (trained(name, GRIDS[0], saves) for saves in (True, False))
    assert [found.moved for found in with_save] == [found.moved for found in without]


@pytest.mark.parametrize("name, grid", PAIRS, ids=str)
def test_a_walk_submits_what_the_engine_submits_in_its_order(name: str, grid: Grid) -> None:
    job = job_of(name)
    model, planned = SmallModel(job.shape, job.dtype), Submissions()
    simulation = StepSimulation(model.unit_specs(), model.uses(), sharding_of(job), grid, planned)
    for _ in range(job.steps):
        simulation.step(job.microbatches, submits_next_climbs=True)
    assert [found.submissions for found in trained(name, grid)] == [planned.found] * grid.world_size


class Submissions:
    """A listener that remembers every submission."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Lane]] = []

    def submit(self, hop: PlannedHop, after: int | None) -> int:
        self.found.append((hop.unit, hop.lane))
        return len(self.found)

    def wait(self, ticket: int) -> None:
        return None

    def read_norm(self) -> None: ...

    def compute(self, use: int, *, is_backward: bool) -> None:
        return None


# ---- the codecs' work


def hops_of(policy: Policy, grid: Grid) -> tuple[int, UnitHops]:
    """Values of a slice's blocks run, and the hops, of one unit."""
    spec = SmallModel(WIDE, torch.bfloat16).unit_specs()[1]
    layout = FlatLayout(spec.params, grid.data_ranks, BLOCK)
    return layout.runs.blocks, UnitHops(layout, Sharding(policy, BLOCK, 2, Prefetch()), grid)


def test_a_difference_is_taken_and_encoded_once_and_every_slice_of_the_copy_is_decoded() -> None:
    blocks, hops = hops_of(KEPT["stage 3"], Grid.of_nodes(3, 2))
    inter, intra = hops.climb
    assert inter.before == CodecWork(subtracted=blocks, gaussian_encoded=blocks, rotated=blocks)
    assert inter.after == CodecWork(gaussian_decoded=3 * blocks, rotated=3 * blocks)
    assert intra.before == intra.after == CodecWork()  # the copy crosses in the working dtype


def test_every_node_rotates_its_gradients_and_the_owner_rotates_each_message_back() -> None:
    two_rounds = with_quantized_gradients(POLICIES[3], LinkCodes(Code.gaussian(2, rounds=2), Code(8)))
    blocks, hops = hops_of(two_rounds, Grid.of_nodes(3, 2))
    intra, inter = hops.descend
    assert intra.before == CodecWork(encoded=6 * blocks)
    assert inter.before == CodecWork(summed=6 * blocks, gaussian_encoded=3 * blocks, rotated=6 * blocks)
    assert inter.after == CodecWork(gaussian_decoded=3 * blocks, rotated=6 * blocks)


def test_one_node_takes_no_difference_and_sends_integers() -> None:
    _, hops = hops_of(KEPT["stage 3"], Grid.of_nodes(1, 2))
    work = [hop.before + hop.after for hop in (*hops.climb, *hops.descend)]
    assert sum(part.gaussian_encoded + part.gaussian_decoded + part.rotated + part.subtracted for part in work) == 0
    assert work[0] == work[1] == CodecWork()


def test_in_full_precision_nothing_is_taken_encoded_or_rotated() -> None:
    _, hops = hops_of(KEPT["stage 3"].in_full_precision(), Grid.of_nodes(3, 2))
    assert all(hop.before + hop.after == CodecWork() for hop in (*hops.climb, *hops.descend))
