"""The plan of a rank's memory against what real engines of a virtual world hold."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from harness.codes import LinkBits, code
from harness.live_bytes import LiveBytes
from harness.small_engine import ROWS, Job, ModelShape, Rank
from harness.worlds import run_world
from hypothesis import given
from hypothesis import strategies as st
from megatron_zpp.zero.plan.memory_plan import MemoryPlan, Sharding, largest_plan, plan_memory

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.codecs import Regions, Runs, make_codec, recode_mean_into
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec, Use
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.policy import (
    POLICIES,
    Policy,
    Rung,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
)
from megatron_zpp.zero.schedule import Moment, Phase, Prefetch

pytestmark = pytest.mark.virtual

QUANTIZED = {
    "qwZ": with_quantized_weights(POLICIES[3]),
    "qwZ in stage 1": with_quantized_weights(POLICIES[1], code(4)),
    "hpZ": with_secondary_weights(POLICIES[3]),
    "qgZ": with_quantized_gradients(POLICIES[3]),
    "ZeRO++": with_quantized_gradients(with_secondary_weights(with_quantized_weights(POLICIES[3]))),
    "two codecs": replace(with_secondary_weights(POLICIES[3]), weight_codes=LinkBits(4, 8).codes()),
    "two codecs, no copy": replace(POLICIES[3], weight_codes=LinkBits(4, 8).codes()),
}
SHAPES = [(1, 1), (1, 2), (2, 1), (3, 2)]


def sharding_of(job: Job) -> Sharding:
    return Sharding(job.policy, job.block_numel, job.dtype.itemsize, job.prefetch)


@dataclass(frozen=True)
class Held:
    """What one rank really had: bytes of states at the end of backward, most bytes of full units, bytes of all staging buffers.

    gathered_in_blocks: most bytes of full units in backward of all uses but the first and the last.
    """

    plan: MemoryPlan
    states: int
    gathered: int
    gathered_in_blocks: int
    staging: int


def train(job: Job, backend: VirtualBackend, steps: int = 2) -> Held:
    rank = Rank(job, backend)
    gathered = in_blocks = 0
    last = len(rank.model.uses()) - 1
    reach = rank.engine._reach

    def reach_and_look(moment: Moment, is_training: bool) -> None:
        nonlocal gathered, in_blocks
        reach(moment, is_training)
        full = sum(unit._full.untyped_storage().nbytes() for unit in rank.engine.units)
        gathered = max(gathered, full)
        if moment.phase in (Phase.PRE_BACKWARD, Phase.RECOMPUTE) and 0 < moment.use < last:
            in_blocks = max(in_blocks, full)

    rank.engine._reach = reach_and_look  # type: ignore[method-assign]
    for step in range(steps):
        rank.accumulate(step)
        rank.engine.finish_gradients()
        states = rank.engine.state_bytes().device
        rank.engine.step(0.1)
    rank.engine.close()
    plan = plan_memory(rank.model.unit_specs(), rank.model.uses(), sharding_of(job), backend.grid.ladder)
    return Held(plan, states, gathered, in_blocks, rank.engine.ladder.staging.allocated_bytes)


@pytest.mark.parametrize(
    "name, shape",
    [(name, shape) for index, name in enumerate([*ROWS, *QUANTIZED]) for shape in (SHAPES[index % 3], (3, 2))],
    ids=str,
)
def test_planned_states_are_what_the_engine_reports_to_the_byte(shape: tuple[int, int], name: str) -> None:
    policy = {**ROWS, **QUANTIZED}[name]
    for held in run_world(shape, lambda backend: train(Job(policy, torch.bfloat16), backend, steps=1)):
        assert held.plan.states == held.states


def test_planned_states_of_an_untied_model_in_fp32_are_what_the_engine_reports_to_the_byte() -> None:
    job = Job(QUANTIZED["ZeRO++"], shape=ModelShape(is_tied=False), microbatches=2)
    for held in run_world((2, 2), lambda backend: train(job, backend, steps=1)):
        assert held.plan.states == held.states


@pytest.mark.parametrize(
    "prefetch, is_tied, chunk",
    [(Prefetch(*ahead), (index + chunk) % 2 == 0, chunk) for index, ahead in enumerate([(2, 1), (0, 0), (3, 2)]) for chunk in (0, 1, 3)],
    ids=str,
)
def test_planned_gathered_units_are_the_most_that_are_full_at_once(prefetch: Prefetch, is_tied: bool, chunk: int) -> None:
    shape = ModelShape(inner=(17, 40, 40, 25, 30), is_tied=is_tied, is_recomputed=chunk > 0, chunk=max(1, chunk))
    job = Job(POLICIES[3], shape=shape, prefetch=prefetch)
    for held in run_world((2, 2), lambda backend: train(job, backend)):
        assert (held.gathered, held.gathered_in_blocks) == (held.plan.gathered, held.plan.gathered_in_blocks)


@pytest.mark.parametrize("name", [*ROWS, *QUANTIZED])
def test_planned_buffers_hold_every_payload_on_its_way(name: str) -> None:
    policy = {**ROWS, **QUANTIZED}[name]
    job = Job(policy, shape=ModelShape(inner=(40,) * 6), microbatches=2)
    for held in run_world((2, 2), lambda backend: train(job, backend)):
        copies = held.plan.secondary if policy.weights_in_step is Rung.SECONDARY else 0
        assert held.staging <= held.plan.buffers + copies


def test_planned_buffers_do_not_grow_with_depth() -> None:
    plans = []
    for layers in (8, 16):
        job = Job(POLICIES[3], shape=ModelShape(inner=(40,) * layers))
        plans.append(run_world((2, 2), lambda backend: train(job, backend))[0].plan)  # noqa: B023
    assert plans[0].buffers == plans[1].buffers and plans[0].gathered == plans[1].gathered


def means_of(policy: Policy, topology: Topology) -> int:
    """Planned fp32 means of a unit of 1024 x 256 values in blocks and 4096 exact ones."""
    uses = (Use("module", ("unit",), needs_weights_in_backward=True),)
    return plan_memory(one_unit((1024, 256), (4096,)), uses, Sharding(policy, 256, 2, Prefetch()), topology).means


@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_planned_means_hold_the_fp32_values_that_exact_codecs_make_beside_payloads_and_sums(stage: int, shape: tuple[int, int]) -> None:
    """With the calls of a descent (comm/links.py:Ladder.descend): a recoding if it has two hops, then a mean that may be added."""
    topology = Topology.of_nodes(*shape)
    slices, members = topology.partitions, topology.partition_ranks
    runs = Runs(1024 * 256 // topology.data_ranks, 4096 // topology.data_ranks)
    codec = make_codec(code(16), torch.bfloat16, 256)
    payload_bytes = codec.payload_bytes(runs)
    own = Regions.of(torch.zeros(runs.numel), runs)
    adds = POLICIES[stage].gradients is Rung.PRIMARY
    between = torch.zeros(slices, payload_bytes, dtype=torch.uint8)
    sent = torch.zeros(members, slices, payload_bytes, dtype=torch.uint8)
    with LiveBytes() as live:
        if slices > 1 and members > 1:
            recode_mean_into(codec, sent, codec, between, runs)
        last = between.view(slices, 1, payload_bytes) if slices > 1 else sent
        if topology.data_ranks > 1:
            codec.decode_mean_into(last, own, accumulate=adds)
    assert live.peak <= means_of(POLICIES[stage], topology) + 64  # and a divisor


def test_codes_of_the_same_blocks_are_recoded_without_fp32_means_but_for_exact_runs() -> None:
    topology = Topology.of_nodes(2, 4)
    plans = {bits: means_of(with_quantized_gradients(POLICIES[3], LinkBits(*bits).codes()), topology) for bits in [(4, 4), (4, 8), (16, 4)]}
    exact = 4096 // 8
    assert plans[4, 4] == plans[4, 8] == 4 * 2 * exact
    assert plans[16, 4] == 4 * 2 * (1024 * 256 // 8 + exact)


def test_weights_that_change_their_code_between_the_links_have_means_too() -> None:
    codes = replace(POLICIES[3], weight_codes=LinkBits(16, 8).codes())
    topology = Topology.of_nodes(2, 4)
    assert means_of(codes, topology) - means_of(POLICIES[3], topology) == 4 * 2 * (1024 * 256 + 4096) // 8


@given(
    blocks=st.integers(0, 9),
    exact=st.integers(0, 300),
    bits=st.sampled_from([4, 8, 16]),
    block_numel=st.sampled_from([32, 96, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_planned_payload_has_the_bytes_of_the_codecs(blocks: int, exact: int, bits: int, block_numel: int, dtype: torch.dtype) -> None:
    runs = Runs(blocks * block_numel, exact)
    codec = make_codec(code(bits), dtype, block_numel)
    sharding = Sharding(POLICIES[3], block_numel, dtype.itemsize, Prefetch())
    assert sharding.payload_bytes(code(bits), runs) == codec.payload_bytes(runs)


def one_unit(*shapes: tuple[int, ...]) -> tuple[UnitSpec, ...]:
    def no_values(start: int, stop: int) -> torch.Tensor:
        raise AssertionError("a plan reads no weight")

    return (
        UnitSpec("unit", tuple(ParamSpec(f"p{index}", Division.undivided(shape), no_values, True) for index, shape in enumerate(shapes))),
    )


def plan_of(policy: Policy, topology: Topology) -> MemoryPlan:
    uses = (Use("module", ("unit",), needs_weights_in_backward=True),)
    return plan_memory(one_unit((1024, 256)), uses, Sharding(policy, 256, 2, Prefetch()), topology)


def test_zeropp_rests_in_16_bytes_per_parameter_of_the_world_and_one_of_the_partition() -> None:
    numel, topology = 1024 * 256, Topology(64, 16, 16)
    plan = plan_of(QUANTIZED["ZeRO++"], topology)
    assert (plan.weights, plan.gradients, plan.optimizer_state) == (4 * numel // 64, 4 * numel // 64, 8 * numel // 64)
    assert plan.secondary == numel // 16 + numel // 256 * 4 // 16  # codes of one byte, and a scale per block


def test_states_of_stage_3_are_a_share_of_the_world() -> None:
    for nodes, ranks_per_node in itertools.product((1, 2, 4), (1, 4)):
        plan = plan_of(POLICIES[3], Topology.of_nodes(nodes, ranks_per_node))
        assert plan.states * nodes * ranks_per_node == 16 * 1024 * 256


def test_a_run_that_starts_in_full_precision_is_planned_with_its_larger_copy() -> None:
    uses = (Use("module", ("unit",), needs_weights_in_backward=True),)
    sharding = Sharding(QUANTIZED["ZeRO++"], 256, 2, Prefetch())
    plans = [largest_plan(one_unit((1024, 256)), uses, sharding, Topology(4, 2, 2), starts_exact=starts) for starts in (False, True)]
    assert plans[1].secondary == 2 * 1024 * 256 // 2 > plans[0].secondary
