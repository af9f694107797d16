from __future__ import annotations

import pytest

from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.model.flops import model_flops
from megatron_zpp.training.hardware import GIGABIT, planned_machine
from megatron_zpp.training.members import MEMBERS, Member, PlannedWorld
from megatron_zpp.training.plan.kinds import COPY
from megatron_zpp.training.plan.program import Submit
from megatron_zpp.training.plan_words import model_teraflops
from megatron_zpp.training.run_plan import RunPlan, plan_as_given, plan_run
from megatron_zpp.training.sharding import choose_policy

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
        assert plan.grid.partition_ranks == partition_ranks
        assert f"--zero-hpz-partition-size {partition_ranks}" in plan.flags


@pytest.mark.parametrize("name", ["ZeRO-1", "+hpZ", "ZeRO++", "lean"])
def test_a_run_as_given_is_the_member_whose_flags_it_has(name: str) -> None:
    plan = planned(name, "--zero-hpz-partition-size 2" if name == "+hpZ" else "")
    assert plan_as_given(plan.config, PlannedWorld(2, 4, is_on_gpu=False), 128).flags == plan.flags


@pytest.mark.parametrize(
    "flags", ["--tensor-model-parallel-size 4", "--context-parallel-size 4", "--tensor-model-parallel-size 2 --context-parallel-size 2"]
)
def test_ranks_that_share_layers_or_tokens_share_the_operations_of_a_micro_batch(flags: str) -> None:
    alone, shared = (planned("ZeRO-3", f"--global-batch-size 8 {more}") for more in ("", flags))
    assert (alone.microbatches, shared.microbatches) == (1, 4) and shared.step.flops == pytest.approx(alone.step.flops)
    assert alone.flops_per_second(2.0) == alone.step.flops / 2


HEAD, LAST, SCORES = (2 * 6 * 16 * size for size in (32 * 128, 32 * 128, 16 * 32))  # of 6 samples: last product of a block, half a square


@pytest.mark.parametrize(
    ("flags", "blocks", "more"),
    [
        ("", 0, 0),
        ("--loss-chunk-tokens 10", 0, HEAD),
        ("--recompute-granularity selective", 0, 3 * SCORES),
        ("--recompute-granularity full", 3, -3 * LAST),
        ("--recompute-granularity full --recompute-num-layers 2", 3, -2 * LAST),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", 1, -LAST),
    ],
)
def test_planned_operations_are_model_flops_and_what_is_recomputed_but_for_the_last_product_of_each_chunk(
    flags: str, blocks: int, more: int
) -> None:
    plan = planned(
        "ZeRO-3", f"--num-layers 3 --micro-batch-size 3 --global-batch-size 6 --loss-chunk-tokens 0 --attention-dropout 0 {flags}", (1, 1)
    )
    required = model_flops(plan.config.model, 128, 6)
    block = (required // 3 - HEAD) // 3
    assert plan.step.flops == required + blocks * block + more


# ---- lean


@pytest.mark.parametrize(
    "asked, flags",
    [("", "--zeropp lean"), ("--zero-hpz-partition-size 2", "--zeropp lean --zero-hpz-partition-size 2")],
)
def test_the_flags_of_lean_are_those_of_a_run_with_its_plan(asked: str, flags: str) -> None:
    plan = planned("lean", asked)
    assert plan.flags == flags
    config = resolve(parse_flags(f"{FLAGS} {flags}".split()), 8, 4)
    assert config.zero.zero_hpz_partition_size == plan.grid.partition_ranks
    assert choose_policy(config.zero) == choose_policy(plan.config.zero)


@pytest.mark.parametrize(("flags", "world"), [("", (3, 1)), ("--tensor-model-parallel-size 4", (2, 4))])
def test_lean_is_planned_in_stages_1_and_2_where_each_node_has_one_data_rank(flags: str, world: tuple[int, int]) -> None:
    for stage in (1, 2):
        plan = planned(f"lean-{stage}", flags, world)
        assert (plan.flags, plan.config.zero.zero_stage) == (f"--zeropp lean --zero-stage {stage}", stage)
    with pytest.raises(FlagError, match="choose --zero-stage 2"):
        planned("lean", flags, world)


def test_on_one_rank_lean_moves_nothing_and_keeps_no_copy() -> None:
    plan = planned("lean", world=(1, 1))
    assert plan.node_bytes == plan.memory.of(COPY) == 0


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
        assert (given.weights, given.gradients, given.memory, given.flags) == (plain.weights, plain.gradients, plain.memory, plain.flags)


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
    assert given.gradients.inter_bytes == 4 * once.gradients.inter_bytes


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
    assert (shared.grid.tensor_ranks, shared.grid.data_ranks, shared.grid.partition_ranks) == (2, 8, 4)
    words = {param.name: param.shape for unit in shared.step.model.units for param in unit.params}
    assert words["embedding.word.weight"] == (64, 32) and words["blocks.0.mlp.up.weight"] == (64, 32)
    assert ("hpz" in shared.flags) == (name == "ZeRO++") and "size 8" not in shared.flags


def test_a_copy_on_the_ranks_of_a_node_in_one_ladder_is_leans_own() -> None:
    assert planned("lean", "--tensor-model-parallel-size 2", world=(2, 8)).flags == "--zeropp lean"


def test_at_equal_global_and_micro_batch_bytes_into_a_node_grow_with_the_ranks_that_share_layers() -> None:
    """Each of T ladders moves a T-th of the weights, but T times as often; norms and padding make it a little more."""
    flags = "--global-batch-size 64 --hidden-size 1024 --quantization-block-size 32"
    alone, shared = (planned("ZeRO-3", f"{flags} --tensor-model-parallel-size {size}", world=(2, 4)) for size in (1, 4))
    assert (alone.microbatches, shared.microbatches) == (8, 32)
    assert shared.node_bytes == pytest.approx(4 * alone.node_bytes, rel=0.02)
    assert alone.tensor_bytes == 0 and shared.tensor_bytes > shared.step.traffic(Category.ACTIVATIONS).tensor_bytes > 0


def test_at_equal_global_batch_and_a_larger_micro_batch_bytes_into_a_node_stay() -> None:
    flags = "--global-batch-size 64 --hidden-size 1024 --quantization-block-size 32"
    alone = planned("ZeRO-3", flags)
    shared = planned("ZeRO-3", f"{flags} --tensor-model-parallel-size 4 --micro-batch-size 4")
    assert shared.node_bytes == pytest.approx(alone.node_bytes, rel=0.02)


def test_a_node_takes_in_what_as_many_ladders_would_as_there_are_ranks_that_share_layers() -> None:
    plan = planned("ZeRO++", "--global-batch-size 16 --tensor-model-parallel-size 2", world=(2, 8))
    assert plan.node_bytes == 2 * plan.grid.ladder.ranks_per_node * (plan.weights + plan.gradients).inter_bytes > 0


def test_collectives_of_a_plan_are_those_of_the_ladder_and_of_the_tensor_link() -> None:
    """Of 2 blocks: 8 of each, two more sums of two collectives, and one for the loss; once per step one for shared elements."""
    alone, shared = planned("ZeRO-3", "--global-batch-size 16"), planned("ZeRO-3", "--global-batch-size 4 --tensor-model-parallel-size 4")
    assert alone.microbatches == shared.microbatches == 2
    hops = sum(isinstance(item, Submit) and item.traffic != Traffic() for item in shared.step.items(2))
    assert shared.step.collectives == hops + 2 * (2 * 8 + 4 + 1) + 1
    assert alone.step.collectives == sum(isinstance(item, Submit) and item.traffic != Traffic() for item in alone.step.items(2))


# ---- islands


def test_a_run_on_islands_has_the_ranks_and_the_batch_of_all_and_the_member_and_bytes_of_one() -> None:
    flags = "--quantization-block-size 256 --train-iters 100"
    joined = planned("ZeRO++", f"{flags} --diloco-sync-period 8 --global-batch-size 32")
    alone = planned("ZeRO++", f"{flags} --global-batch-size 16", (1, 4))
    assert (joined.islands, joined.world_size, joined.grid) == (2, 8, alone.grid)
    assert (joined.microbatches, joined.flags, joined.rank_bytes) == (alone.microbatches, alone.flags, alone.rank_bytes)
    assert model_teraflops(joined, 1.0) == model_teraflops(alone, 1.0)
    assert joined.node_bytes == alone.node_bytes == alone.outer_node_bytes == alone.outer_most_bytes == 0
    assert 0 < joined.outer_node_bytes < joined.outer_most_bytes
    machine = planned_machine(1e-3, 100.0, 1e12, is_on_gpu=True)
    assert joined.time(machine).seconds > alone.time(machine).seconds
    assert joined.time(machine).inter_link == pytest.approx(joined.outer_node_bytes / (1e-3 * GIGABIT))


def test_members_that_islands_cannot_have_are_refused() -> None:
    for name in ("ZeRO-0", "lean"):
        with pytest.raises(FlagError, match="--diloco-sync-period"):
            planned(name, "--diloco-sync-period 8 --diloco-islands 2", (4, 4))
