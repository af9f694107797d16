"""What a plan says about outer steps against real ones of a virtual world: bytes of every step, memory, what is saved, and time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.island_run import IslandFlags, IslandRank, held_by_islands, run_islands_of
from harness.planned_rank import check_peak

from megatron_zpp.checkpoint.island_state import IslandState
from megatron_zpp.comm.ledger import Category
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.ops import extension
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.training.memory_need import memory_need
from megatron_zpp.training.plan.clock import StepTime
from megatron_zpp.training.plan.kinds import OUTER
from megatron_zpp.training.plan.machine import CodecSpeed, LinkSpeed, Machine, Overlap
from megatron_zpp.training.plan.outer_plan import OuterPlan, outer_plan
from megatron_zpp.training.plan.planned_step import plan_step
from megatron_zpp.training.sharding import checkpoint_bytes, grid_of, layouts_of

pytestmark = pytest.mark.virtual

VOCAB = 96
MODEL = (
    f"--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size {VOCAB} --make-vocab-size-divisible-by 8 "
    "--mock-data --train-iters 100 --hidden-dropout 0 --attention-dropout 0 --bf16"
)


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Plans are of ranks whose kernels are built; those in Python make more tensors."""
    extension.load()


def run_of(flags: str = "--zero-stage 3", outer: str = "", nodes: int = 2, ranks_per_node: int = 2, period: int = 4) -> IslandFlags:
    return IslandFlags(f"{MODEL} {flags}", f"--diloco-sync-period {period} --diloco-start-iteration 0 {outer}", nodes, ranks_per_node)


def planned(run: IslandFlags) -> OuterPlan:
    found = outer_plan(run.config, VOCAB, run.grid)
    assert found is not None
    return found


# ---- bytes


def into_nodes(run: IslandFlags) -> list[list[int]]:
    """By node, the bytes of outer steps that enter it for each iteration of two periods."""

    def program(rank: IslandRank) -> list[int]:
        ledger, moved = rank.engine.links.ledger, []
        for step in range(2 * rank.outer.options.period):
            rank.session.step(step)
            before = ledger.total(Category.OUTER)
            rank.outer.step()
            rank.outer.check_open()  # until then an exchange is under way
            moved.append((ledger.total(Category.OUTER) - before).inter_bytes)
        return moved

    by_rank, per_node = run_islands_of(run, program), run.ranks_per_node
    nodes = [by_rank[first : first + per_node] for first in range(0, len(by_rank), per_node)]
    return [[sum(ranks) for ranks in zip(*node, strict=True)] for node in nodes]


BITS_16 = "--diloco-outer-bits 16 --diloco-difference-bits 16"


@pytest.mark.parametrize(
    "run",
    [
        run_of(),
        run_of(outer="--diloco-all-at-once"),
        run_of(outer=BITS_16),
        run_of("--zero-stage 1", "--diloco-difference-bits 1", 4, 1),
        run_of(outer=f"{BITS_16} --diloco-all-at-once", nodes=4, ranks_per_node=1),
        run_of("--zero-stage 2 --tensor-model-parallel-size 2 --untie-embeddings-and-output-weights"),
        run_of("--zero-stage 3 --hidden-size 32 --num-layers 1", nodes=2, ranks_per_node=3, period=2),  # slices that are all padding
        run_of("--zero-stage 0", nodes=3, ranks_per_node=1, period=1),
        run_of(nodes=1),  # one island, and nothing crosses
        run_of(outer="--diloco-overlap-steps 1"),
        run_of(outer="--diloco-overlap-steps 1 --diloco-all-at-once"),
    ],
    ids=lambda run: f"{run.nodes}x{run.ranks_per_node} {run.flags.split('--bf16')[1]} {run.outer}",
)
def test_bytes_into_a_node_are_those_that_the_ledgers_of_its_ranks_book_in_every_step_of_a_period(run: IslandFlags) -> None:
    plan = planned(run)
    due = [sum(plan.node_bytes[unit] for unit in units) for units in plan.due]
    for moved in into_nodes(run):
        assert moved[: plan.options.period] == moved[plan.options.period :]
        assert [nbytes for nbytes in moved[: plan.options.period] if nbytes] == [nbytes for nbytes in due if nbytes]
        assert sum(moved) / len(moved) == plan.average_bytes
        assert max(moved) == plan.most_bytes
    assert (plan.most_bytes > 0) == (run.nodes > 1)


def test_bytes_into_a_node_of_an_island_of_several_are_those_of_the_node_with_the_most() -> None:
    run = run_of("--hidden-size 48 --zero-stage 3 --zero-hpz-partition-size 2", "--diloco-islands 2", nodes=4)
    plan, moved = planned(run), into_nodes(run)
    assert max(map(sum, moved)) <= 2 * sum(plan.node_bytes) <= 1.1 * max(map(sum, moved))
    assert max(map(max, moved)) <= plan.most_bytes


def test_without_outer_steps_there_is_no_plan_of_them() -> None:
    config = resolve(parse_flags(MODEL.split()), 2, 1)
    assert outer_plan(config, VOCAB, grid_of(config, 2)) is None


# ---- memory


@pytest.mark.parametrize(
    "run",
    [
        run_of(period=1),
        run_of("--zero-stage 1 --num-layers 8", nodes=4, ranks_per_node=1, period=1),
        run_of("--zero-stage 2 --tensor-model-parallel-size 2", period=1),
        run_of("--zero-stage 3 --num-layers 9 --recompute-granularity full", BITS_16, period=1),
        run_of("--zeropp lean --num-layers 8", period=1),
        run_of(nodes=1, period=1),
        run_of("--zero-stage 3 --num-layers 8 --optimizer-cpu-offload", period=1),
        run_of("--zero-stage 3 --num-layers 8", "--diloco-overlap-steps 1", period=2),
        run_of("--zero-stage 1 --num-layers 8", "--diloco-overlap-steps 1", nodes=4, ranks_per_node=1, period=2),
        run_of("--zero-stage 3 --num-layers 8", "--diloco-overlap-steps 1 --diloco-all-at-once", period=2),
    ],
    ids=lambda run: f"{run.nodes}x{run.ranks_per_node} {run.flags.split('--bf16')[1]}",
)
def test_planned_states_of_outer_steps_are_the_real_ones_and_the_planned_peak_holds_that_of_a_step_with_exchanges(
    run: IslandFlags,
) -> None:
    step = plan_step(run.config, run.grid, VOCAB, is_on_gpu=False)
    assert step.memory.on_device[OUTER] == max(run_islands_of(run, lambda rank: rank.outer.state_bytes()))
    # The thread of the lanes may refer to an exchange that has ended for a moment longer, while the next one begins.
    spare = 4 * max(layout.slice_numel for layout in layouts_of(run.config, VOCAB, run.grid))
    check_peak(step.memory.on_device, [replace(rank, peak=rank.peak - spare) for rank in held_by_islands(run)])


@pytest.mark.parametrize("is_on_gpu", [False, True])
@pytest.mark.parametrize("flags", ["--zero-stage 3", "--zero-stage 3 --zero-quantized-weights --zero-full-precision-iters 1"])
def test_the_program_of_a_step_and_its_bytes_are_those_of_an_island_alone(flags: str, is_on_gpu: bool) -> None:
    run = run_of(f"{flags} --global-batch-size 8")
    alone = resolve(parse_flags(f"{MODEL} {flags} --global-batch-size 4".split()), 2, 2)
    own, others = (plan_step(config, run.grid, VOCAB, is_on_gpu=is_on_gpu) for config in (run.config, alone))
    assert list(own.items(2)) == list(others.items(2))
    assert own.traffic(*Category) == others.traffic(*Category)
    assert own.memory.total >= others.memory.total + own.memory.on_device[OUTER]


# ---- what is saved


@pytest.mark.parametrize("with_moments", [True, False])
@pytest.mark.parametrize(
    "run", [run_of("--zero-stage 3 --async-save --save x"), run_of("--zero-stage 1 --async-save --save x", nodes=3, ranks_per_node=1)]
)
def test_a_checkpoint_and_the_copy_for_it_hold_what_all_ranks_and_each_of_them_save(run: IslandFlags, with_moments: bool) -> None:
    run = IslandFlags(run.flags + " --no-save-optim" * (not with_moments), run.outer, run.nodes, run.ranks_per_node)

    def program(rank: IslandRank) -> int:
        return sum(piece.values.nbytes for piece in IslandState(rank.outer).share(with_moments=with_moments).pieces)

    saved = run_islands_of(run, program)
    assert sum(saved) == checkpoint_bytes(run.config, run.grid, VOCAB)
    assert sum(saved) % parameter_count(run.config.model, VOCAB) == 0
    copy = memory_need(run.config, VOCAB, run.grid, is_on_gpu=True).save_copy
    assert max(saved) <= copy <= 1.25 * max(saved)


# ---- time

FOUR = OuterPlan(OuterOptions(2, is_staggered=False), 2, (100,) * 4, (10,) * 4, ahead=0, embeds_twice=False)
IN_TURNS = replace(FOUR, options=OuterOptions(4))
INNER = StepTime(100.0, computing=180.0, inter_link=1.0, intra_link=0.0, codecs=0.0)  # with 2 micro-batches, 30 s of forward in each


def machine(latency_seconds: float = 0.0, seconds_per_collective: float = 0.0, overlap: Overlap = Overlap.STREAMS) -> Machine:
    inter = LinkSpeed(1.0, seconds_per_collective, latency_seconds)
    return Machine(inter, LinkSpeed(1.0), CodecSpeed(), overlap, 1.0)


def added(plan: OuterPlan, on: Machine) -> float:
    """Seconds that outer steps add in a period."""
    return plan.options.period * (plan.added_to(INNER, on, microbatches=2).seconds - INNER.seconds)


def test_of_exchanges_at_once_all_but_two_are_waited_for_and_these_hide_behind_the_forward_before_their_units() -> None:
    assert added(FOUR, machine()) == 20  # until the first two have ended; a third of forward is before unit 2, two thirds before unit 3
    assert added(replace(FOUR, ahead=1), machine()) == 30
    assert added(FOUR, machine(overlap=Overlap.NONE)) == 40


def test_units_in_turns_wait_for_their_own_exchange_alone_beyond_the_forward_before_them() -> None:
    assert added(IN_TURNS, machine()) == 10 + 10 + 0 + 0  # the look-up of the first unit takes no time
    assert added(replace(IN_TURNS, embeds_twice=True), machine()) == 10 + 10 + 2.5 + 0
    assert added(IN_TURNS, machine(seconds_per_collective=1.0)) == 12 + 12 + 2 + 0


def test_late_exchanges_hide_behind_the_whole_next_step() -> None:
    late, late_at_once = (replace(plan, options=replace(plan.options, overlap_steps=1)) for plan in (IN_TURNS, FOUR))
    assert added(late, machine(seconds_per_collective=1.0)) == 0
    assert added(late, machine(seconds_per_collective=50.0)) == 4 * (10 + 100 - 100)
    assert added(late_at_once, machine()) == 20  # until the first two have ended
    assert added(late, machine(overlap=Overlap.NONE)) == 40


def test_every_exchange_takes_the_latency_of_the_rounds_of_a_gather_and_of_an_exchange() -> None:
    assert added(replace(IN_TURNS, islands=4), machine(latency_seconds=5.0)) == 30 + 30 + 20 + 10
    assert replace(IN_TURNS, islands=4).added_to(INNER, machine(latency_seconds=5.0), 2).latency == 4 * 20 / 4


def test_the_link_between_nodes_is_busy_with_the_mean_of_a_period() -> None:
    assert IN_TURNS.added_to(INNER, machine(), 2).inter_link == 1 + 40 / 4
    assert FOUR.added_to(INNER, machine(), 2).inter_link == 1 + 40 / 2


def test_one_island_alone_waits_for_nothing() -> None:
    alone = replace(FOUR, islands=1, node_bytes=(0,) * 4)
    assert alone.added_to(INNER, machine(latency_seconds=5.0, seconds_per_collective=1.0), 2) == INNER
