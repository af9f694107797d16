"""The time of planned steps: what the engine's own program makes of links, codecs and a host."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_zpp.comm.ledger import Category
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.plan.clock import StepTime, step_time
from megatron_zpp.training.plan.machine import CodecSpeed, HostSpeed, LinkSpeed, Machine, Overlap
from megatron_zpp.training.plan.planned_step import PlannedStep, plan_step
from megatron_zpp.training.plan.program import ComeDown, Copy, UpdateOnHost
from megatron_zpp.training.sharding import grid_of, layouts_of

pytestmark = pytest.mark.pure

FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 300 --make-vocab-size-divisible-by 128 --bf16"
VOCAB, NODES, RANKS = 384, 3, 2
INFINITE = LinkSpeed(float("inf"))
PAPER, LEAN = "--zeropp paper", "--zeropp lean"
MICROBATCHES = 2


@cache
def planned(
    flags: str, microbatches: int = MICROBATCHES, *, is_on_gpu: bool = False, nodes: int = NODES, ranks: int = RANKS
) -> tuple[PlannedStep, Grid]:
    world = nodes * ranks
    given = parse_flags(f"{FLAGS} --micro-batch-size 2 {flags}".split())
    resolved = resolve(given, world, ranks)
    batch = microbatches * 2 * grid_of(resolved, world).sample_groups
    config = resolve(given.with_values(global_batch_size=batch), world, ranks)
    grid = grid_of(config, world)
    return plan_step(config, grid, VOCAB, is_on_gpu=is_on_gpu), grid


def timed(plan: tuple[PlannedStep, Grid], inter: LinkSpeed = INFINITE, intra: LinkSpeed = INFINITE, **more: object) -> StepTime:
    values = {"overlap": Overlap.STREAMS, "codec": CodecSpeed(), "flops_per_second": 1e9} | more
    return step_time(*plan, Machine(inter, intra, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", ["--zero-stage 0", "--zero-stage 3", PAPER, LEAN])
def test_without_overlap_a_step_takes_its_products_its_bytes_and_a_constant_for_each_collective(flags: str) -> None:
    plan, grid = planned(flags, 1)
    traffic = plan.traffic(Category.WEIGHTS, Category.GRADIENTS)
    time = timed((plan, grid), LinkSpeed(1e6, 1e-3), LinkSpeed(1e7, 1e-3), overlap=Overlap.NONE)
    assert time.computing == pytest.approx(plan.flops / 1e9)
    assert time.inter_link == pytest.approx(traffic.inter_bytes * RANKS / 1e6)
    assert time.intra_link == pytest.approx(traffic.intra_bytes / 1e7)
    assert time.seconds == pytest.approx(time.inter_link + time.intra_link + time.computing + 1e-3 * plan.collectives)


def test_where_links_are_all_that_takes_time_the_speedup_is_that_of_the_bytes() -> None:
    plain, paper = planned("--zero-stage 3"), planned(PAPER)
    nbytes = [plan.traffic(Category.WEIGHTS, Category.GRADIENTS).inter_bytes for plan, _ in (plain, paper)]
    times = [timed(plan, LinkSpeed(1e6), flops_per_second=float("inf")).seconds for plan in (plain, paper)]
    assert times[0] / times[1] == pytest.approx(nbytes[0] / nbytes[1])


def test_more_rounds_of_rotation_take_longer() -> None:
    times = [timed(planned(f"{LEAN} --zero-quantized-gradients-inter-bits {bits}"), codec=CodecSpeed(rotated=1e-9)) for bits in (2, 3)]
    assert times[0].codecs > times[1].codecs > 0


def test_a_gather_of_stage_1_takes_the_latency_for_every_other_node_and_an_exchange_once() -> None:
    """Three nodes: six units climb in two rounds and descend in one, and norm and losses are gathered in two rounds."""
    time = timed(planned("--zero-stage 1", 1), LinkSpeed(float("inf"), latency_seconds=0.05), overlap=Overlap.NONE)
    assert time.latency == pytest.approx(0.05 * (6 * 2 + 6 + 2))
    assert time.seconds == pytest.approx(time.computing + time.latency)


# ---- ranks that share layers or divide samples


def test_the_time_of_a_step_has_the_waits_for_ranks_that_share_layers() -> None:
    plan = planned("--zero-stage 3 --tensor-model-parallel-size 2 --sequence-parallel", is_on_gpu=True)
    slow, fast = (timed(plan, tensor=LinkSpeed(rate)) for rate in (1e4, 1e9))
    nbytes = plan[0].traffic(*Category).tensor_bytes
    assert slow.tensor_link == pytest.approx(nbytes / 1e4) and fast.tensor_link == pytest.approx(nbytes / 1e9)
    assert slow.computing < fast.seconds + slow.tensor_link and slow.seconds > fast.seconds


@pytest.mark.parametrize("is_on_gpu", [False, True], ids=["thread", "streams"])
def test_what_divided_samples_exchange_takes_the_link_that_joins_their_ranks(is_on_gpu: bool) -> None:
    inside, across = (planned(f"--zero-stage 3 --context-parallel-size {size}", nodes=2, ranks=2, is_on_gpu=is_on_gpu) for size in (2, 4))
    near, far = (timed(plan, LinkSpeed(1e6), LinkSpeed(1e6)) for plan in (inside, across))
    assert near.context_link == pytest.approx(inside[0].traffic(Category.EXCHANGES).context_bytes / 1e6)
    crossing = across[0].traffic(Category.EXCHANGES).context_inter_bytes
    assert far.context_link == pytest.approx(2 * crossing / 1e6)
    assert near.seconds < near.computing + near.context_link + near.inter_link + near.intra_link


# ---- an optimizer on the host, and inputs that are kept there

HOST = HostSpeed(bytes_per_second=1e6, values_per_second=1e6)


def owned(flags: str) -> list[int]:
    config = resolve(parse_flags(f"{FLAGS} {flags}".split()), NODES * RANKS, RANKS)
    return [layout.slice_numel for layout in layouts_of(config, VOCAB, grid_of(config, NODES * RANKS))]


@pytest.mark.parametrize("flags", ["--zero-stage 3", PAPER, LEAN, "--zero-stage 1"])
def test_a_host_updates_every_value_once_and_gradients_and_weights_cross_its_link_once(flags: str) -> None:
    plan = planned(f"{flags} --optimizer-cpu-offload", is_on_gpu=True)
    time = timed(plan, host=HOST)
    items = list(plan[0].items(MICROBATCHES))
    values = sum(owned(flags))
    assert sum(item.numel for item in items if isinstance(item, UpdateOnHost)) == values
    assert sum(item.nbytes for item in items if isinstance(item, ComeDown)) == 4 * values
    up = sum(getattr(item, "host_bytes", 0) for item in items)
    assert 0 < up <= 2 * values + 16 * len(items)
    assert (time.host, time.host_link) == pytest.approx((values * RANKS / 1e6, (4 * values + up) / 1e6))
    in_turn = time.computing + time.host
    assert time.host < time.seconds <= in_turn + time.host_link


def test_updates_hide_behind_what_has_been_enqueued() -> None:
    plan = planned("--zero-stage 3 --optimizer-cpu-offload", is_on_gpu=True)
    fast_copies = HostSpeed(1e12, 1e6)
    time = timed(plan, host=fast_copies, flops_per_second=1e7)
    assert time.seconds < time.computing + time.host


def test_an_optimizer_whose_device_is_the_host_takes_the_time_of_one_that_is_not_offloaded() -> None:
    times = [timed(planned(f"--zero-stage 3 {more}"), LinkSpeed(1e6), overlap=Overlap.THREAD) for more in ("--optimizer-cpu-offload", "")]
    assert times[0] == times[1]


X = 2 * 16 * 64 * 2  # samples, tokens, hidden size, bytes


@pytest.mark.parametrize(
    ("flags", "is_on_gpu", "nbytes"),
    [
        ("--checkpoint-in-cpu", True, X),
        ("--checkpoint-in-cpu --tensor-model-parallel-size 2", True, X),
        ("--checkpoint-in-cpu --tensor-model-parallel-size 2 --partition-activations", True, X // 2),
        ("--checkpoint-in-cpu --tensor-model-parallel-size 2 --sequence-parallel", True, X // 2),
        ("--contiguous-checkpointing", True, 0),
        ("--checkpoint-in-cpu", False, 0),
    ],
)
def test_kept_inputs_cross_the_host_link_once_in_each_direction_for_each_chunk_and_micro_batch(
    flags: str, is_on_gpu: bool, nbytes: int
) -> None:
    plan = planned(f"--zero-stage 3 --checkpoint-activations {flags}", is_on_gpu=is_on_gpu)
    copies = [item for item in plan[0].items(MICROBATCHES) if isinstance(item, Copy)]
    assert {item.nbytes for item in copies} == ({nbytes} if nbytes else set())
    assert sum(item.down for item in copies) == sum(not item.down for item in copies) == (4 * MICROBATCHES if nbytes else 0)
    time = timed(plan, host=HOST)
    assert time.host_link == pytest.approx(4 * MICROBATCHES * 2 * nbytes / 1e6)


def test_copies_of_kept_inputs_hide_behind_their_chunks_but_for_the_first_one_up() -> None:
    plan = planned("--zero-stage 3 --checkpoint-activations --checkpoint-in-cpu", is_on_gpu=True)
    alone = timed(plan, flops_per_second=1e6).seconds  # a block takes seconds, a copy milliseconds
    copy = X / 1e6
    found = timed(plan, flops_per_second=1e6, host=HOST).seconds
    assert alone + MICROBATCHES * copy * (1 - 1e-6) <= found <= alone + 2 * MICROBATCHES * copy
