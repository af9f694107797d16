from __future__ import annotations

import pytest
from megatron_zpp.zero.plan.host_copies import KeptOnHost
from megatron_zpp.zero.plan.traffic import planned_traffic

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.hardware import planned_machine
from megatron_zpp.training.members import MEMBERS, Member, PlannedWorld
from megatron_zpp.training.run_plan import RunPlan, plan_as_given, plan_run
from megatron_zpp.training.sharding import sharding_of

FLAGS = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --bf16 --ranks-per-node 4"


def member(name: str) -> Member:
    return next(member for member in MEMBERS if member.name == name)


def planned(name: str, flags: str = "", world: tuple[int, int] = (2, 4)) -> RunPlan:
    given = parse_flags(f"{FLAGS} --ranks-per-node {world[1]} {flags}".split())
    return plan_run(given, member(name), PlannedWorld(*world, is_on_gpu=False), 128)


def test_the_flags_of_a_member_ask_for_the_partition_that_was_planned() -> None:
    zeropp = member("ZeRO++")
    for asked, partition_ranks in (("", 4), ("--zero-hpz-partition-size 2", 2)):
        given = parse_flags(f"{FLAGS} {asked}".split())
        plan = plan_run(given, zeropp, PlannedWorld(2, 4, is_on_gpu=False), 128)
        assert plan.job.grid.partition_ranks == partition_ranks
        assert f"--zero-hpz-partition-size {partition_ranks}" in plan.flags


@pytest.mark.parametrize("name", ["ZeRO-1", "+hpZ", "ZeRO++", "lean"])
def test_a_run_as_given_is_the_member_whose_flags_it_has(name: str) -> None:
    plan = planned(name, "--zero-hpz-partition-size 2" if name == "+hpZ" else "")
    assert plan_as_given(plan.config, PlannedWorld(2, 4, is_on_gpu=False), 128).flags == plan.flags


@pytest.mark.parametrize(
    "flags", ["--tensor-model-parallel-size 4", "--context-parallel-size 4", "--tensor-model-parallel-size 2 --context-parallel-size 2"]
)
def test_ranks_that_share_layers_or_tokens_share_the_operations_of_a_micro_batch(flags: str) -> None:
    config = resolve(parse_flags(FLAGS.split()), 8, 4)
    alone, shared = (computation_by_rate(resolve(parse_flags(f"{FLAGS} {more}".split()), 8, 4), 128, 1e9) for more in ("", flags))
    assert shared.forward == pytest.approx([seconds / 4 for seconds in alone.forward])
    assert shared.backward == pytest.approx([seconds / 4 for seconds in alone.backward])
    assert computation_by_step(config, 128, seconds=6.0, microbatches=3).seconds == pytest.approx(2.0)


# ---- kept inputs

X = 2 * 16 * 32 * 2  # samples, tokens, hidden size, bytes


@pytest.mark.parametrize(
    ("flags", "on_gpu", "expected"),
    [
        ("--checkpoint-in-cpu", True, KeptOnHost(X)),
        ("--checkpoint-in-cpu --tensor-model-parallel-size 2", True, KeptOnHost(X)),
        ("--checkpoint-in-cpu --tensor-model-parallel-size 2 --partition-activations", True, KeptOnHost(X // 2, is_divided=True)),
        ("--checkpoint-in-cpu --tensor-model-parallel-size 2 --sequence-parallel", True, KeptOnHost(X // 2)),
        ("--contiguous-checkpointing", True, KeptOnHost()),
        ("--checkpoint-in-cpu", False, KeptOnHost()),
    ],
)
def test_kept_inputs_cross_the_host_link_once_in_each_direction_for_each_chunk_and_micro_batch(
    flags: str, on_gpu: bool, expected: KeptOnHost
) -> None:
    config = resolve(parse_flags(f"{FLAGS} --checkpoint-activations --micro-batch-size 2 --global-batch-size 32 {flags}".split()), 8, 4)
    plan = plan_as_given(config, PlannedWorld(2, 4, is_on_gpu=on_gpu), 128)
    assert plan.job.kept_on_host == expected
    time = plan.time(planned_machine(100, 100, is_on_gpu=on_gpu), computation_by_rate(config, 128, 1e12))
    assert time.host_link == pytest.approx(plan.job.microbatches * 2 * 2 * expected.part_bytes / 25e9)  # 2 chunks, 2 directions


# ---- lean


@pytest.mark.parametrize(
    "asked, flags",
    [("", "--zeropp lean"), ("--zero-hpz-partition-size 2", "--zeropp lean --zero-hpz-partition-size 2")],
)
def test_the_flags_of_lean_are_those_of_a_run_with_its_plan(asked: str, flags: str) -> None:
    plan = planned("lean", asked)
    assert plan.flags == flags
    config = resolve(parse_flags(f"{FLAGS} {flags}".split()), 8, 4)
    assert (config.zero.zero_hpz_partition_size, sharding_of(config)) == (plan.job.grid.partition_ranks, plan.job.sharding)


@pytest.mark.parametrize(("flags", "world"), [("", (3, 1)), ("--tensor-model-parallel-size 4", (2, 4))])
def test_lean_is_planned_in_stages_1_and_2_where_each_node_has_one_data_rank(flags: str, world: tuple[int, int]) -> None:
    for stage in (1, 2):
        plan = planned(f"lean-{stage}", flags, world)
        assert (plan.flags, plan.config.zero.zero_stage) == (f"--zeropp lean --zero-stage {stage}", stage)
    with pytest.raises(FlagError, match="choose --zero-stage 2"):
        planned("lean", flags, world)


def test_on_one_rank_lean_moves_nothing_and_keeps_no_copy() -> None:
    plan = planned("lean", world=(1, 1))
    assert plan.node_bytes == plan.memory.plan.secondary == 0


GIVEN = [
    "--zeropp lean",
    "--zeropp paper",
    "--zeropp lean --zero-stage 2 --zero-quantized-weight-differences-bits 1",
    "--zero-stage 3 --zero-hpz-partition-size 4 --zero-quantized-weight-differences --zero-gradients-between-microbatches primary",
]


@pytest.mark.parametrize("flags", GIVEN)
def test_a_set_among_the_flags_changes_no_other_member(flags: str) -> None:
    for name in (member.name for member in MEMBERS if not member.is_lean):
        given, plain = planned(name, f"{flags} --global-batch-size 16"), planned(name, "--global-batch-size 16")
        assert (given.traffic, given.memory, given.flags) == (plain.traffic, plain.memory, plain.flags)


def test_bits_count_where_a_members_code_has_them() -> None:
    flags = "--zeropp lean --zero-quantized-gradients-inter-bits 2 --zero-quantized-weight-differences-bits 1"
    assert planned("lean", flags).node_bytes < planned("lean").node_bytes
    assert planned("ZeRO++", flags).node_bytes == planned("ZeRO++").node_bytes
    for flags in ("--zero-quantized-gradients --zero-quantized-gradients-inter-bits 8", "--zero-quantized-gradients-rotation hadamard"):
        assert planned("lean", flags).node_bytes == planned("lean").node_bytes


def test_lean_with_several_micro_batches_sends_gradients_once() -> None:
    once, several = planned("lean"), planned("lean", "--global-batch-size 32")
    assert once.node_bytes == several.node_bytes
    given = planned("lean", "--global-batch-size 32 --zero-gradients-between-microbatches primary")
    assert given.traffic.gradients.inter_bytes == 4 * once.traffic.gradients.inter_bytes


def test_sums_inside_partitions_count_for_the_members_that_can_have_them() -> None:
    flags = "--global-batch-size 32 --zero-gradients-between-microbatches secondary"
    for name in ("ZeRO-0", "ZeRO-1"):
        assert planned(name, flags).node_bytes == planned(name, "--global-batch-size 32").node_bytes
    for name in ("ZeRO-2", "ZeRO-3", "ZeRO++"):
        assert planned(name, flags).node_bytes < planned(name, "--global-batch-size 32").node_bytes


def test_a_block_that_lean_cannot_have_is_refused_for_lean_alone() -> None:
    with pytest.raises(FlagError, match="--quantization-block-size 32 does not fit .* is set by --zeropp lean"):
        planned("lean", "--quantization-block-size 32")
    assert planned("ZeRO++", "--quantization-block-size 32").node_bytes > 0


@pytest.mark.parametrize(
    "flags, name",
    [
        ("--zeropp paper", "ZeRO-3 + qwZ + hpZ + qgZ"),
        ("--zeropp lean", "ZeRO-3 + hpZ + weight differences + qgZ in Gaussian codes"),
        (
            "--zeropp lean --zero-stage 2 --global-batch-size 16",
            "ZeRO-2 + weight differences + qgZ in Gaussian codes + gradients summed inside partitions",
        ),
        ("--zero-stage 1 --zero-quantized-weight-differences", "ZeRO-1 + weight differences"),
    ],
)
def test_a_plan_of_given_flags_names_what_they_turn_on(flags: str, name: str) -> None:
    plan = plan_as_given(resolve(parse_flags(f"{FLAGS} {flags}".split()), 8, 4), PlannedWorld(2, 4, is_on_gpu=False), 128)
    assert plan.member.name == name


# ---- ranks that share layers


@pytest.mark.parametrize("name", ["ZeRO-2", "ZeRO-3", "ZeRO++", "lean"])
def test_members_are_planned_with_local_parts_on_the_data_ranks_of_one_ladder(name: str) -> None:
    shared = planned(name, "--tensor-model-parallel-size 2", world=(2, 8))
    assert (shared.job.grid.tensor_ranks, shared.job.grid.data_ranks, shared.job.grid.partition_ranks) == (2, 8, 4)
    words = {param.name: param.shape for unit in shared.job.unit_specs for param in unit.params}
    assert words["embedding.word.weight"] == (64, 32) and words["blocks.0.mlp.up.weight"] == (64, 32)
    assert ("hpz" in shared.flags) == (name == "ZeRO++") and "size 8" not in shared.flags


def test_a_copy_on_the_ranks_of_a_node_in_one_ladder_is_leans_own() -> None:
    assert planned("lean", "--tensor-model-parallel-size 2", world=(2, 8)).flags == "--zeropp lean"


def test_at_equal_global_and_micro_batch_bytes_into_a_node_grow_with_the_ranks_that_share_layers() -> None:
    """Each of T ladders moves a T-th of the weights, but T times as often; norms and padding make it a little more."""
    flags = "--global-batch-size 64 --hidden-size 1024 --quantization-block-size 32"
    alone, shared = (planned("ZeRO-3", f"{flags} --tensor-model-parallel-size {size}", world=(2, 4)) for size in (1, 4))
    assert (alone.job.microbatches, shared.job.microbatches) == (8, 32)
    assert shared.node_bytes == pytest.approx(4 * alone.node_bytes, rel=0.02)
    assert alone.tensor_bytes == 0 and shared.tensor_bytes > 32 * shared.job.tensor_work.nbytes > 0


def test_at_equal_global_batch_and_a_larger_micro_batch_bytes_into_a_node_stay() -> None:
    flags = "--global-batch-size 64 --hidden-size 1024 --quantization-block-size 32"
    alone = planned("ZeRO-3", flags)
    shared = planned("ZeRO-3", f"{flags} --tensor-model-parallel-size 4 --micro-batch-size 4")
    assert shared.node_bytes == pytest.approx(alone.node_bytes, rel=0.02)


def test_a_node_takes_in_what_as_many_ladders_would_as_there_are_ranks_that_share_layers() -> None:
    job = planned("ZeRO++", "--global-batch-size 16 --tensor-model-parallel-size 2", world=(2, 8)).job
    ladder = Grid(job.grid.data_ranks, job.grid.ladder.ranks_per_node, job.grid.partition_ranks)
    of_ladder = planned_traffic(job.unit_specs, job.uses, job.sharding, ladder, job.microbatches)
    of_all = planned_traffic(job.unit_specs, job.uses, job.sharding, job.grid, job.microbatches)
    assert of_all == of_ladder
    assert job.grid.into_node(of_all.total.inter_bytes) == 2 * ladder.into_node(of_ladder.total.inter_bytes) > 0


def test_collectives_of_a_plan_are_those_of_the_ladder_and_of_the_tensor_link() -> None:
    """Of 2 blocks: 8 of each, two more sums of two collectives, and one for the loss; once per step one for shared elements."""
    alone, shared = (planned("ZeRO-3", f"--global-batch-size 16 --tensor-model-parallel-size {size}") for size in (1, 4))
    assert alone.collectives == alone.traffic.collectives
    assert shared.collectives == shared.traffic.collectives + shared.job.microbatches * (2 * 8 + 4 + 1) + 1


def test_the_time_of_a_step_has_the_waits_for_ranks_that_share_layers() -> None:
    plan = planned("ZeRO-3", "--tensor-model-parallel-size 4 --sequence-parallel")
    computation = computation_by_rate(plan.config, 128, 1e12)
    slow, fast = (plan.time(planned_machine(1e6, rate, is_on_gpu=True), computation) for rate in (1e-3, 1e3))
    assert slow.tensor_link > 10 * fast.tensor_link > 0 and slow.seconds > fast.seconds
