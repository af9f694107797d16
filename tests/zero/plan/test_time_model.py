"""The clocks of the time model: what they add up to where the sum is known, and bounds where it is not."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.link_work import LinkWork, LinkWorkOfUses
from megatron_zpp.training.sharding import sharding_of
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.plan.host_copies import KeptOnHost
from megatron_zpp.zero.plan.time_model import CodecSpeed, Computation, HostSpeed, Job, LinkSpeed, Machine, Overlap, StepTime, step_time
from megatron_zpp.zero.plan.traffic import planned_traffic

INFINITE = LinkSpeed(float("inf"))
FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 300 --bf16 --zero-stage 3"
USES = 6
ALL = "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients"
LEAN = "--zeropp lean"
COMPUTATION = Computation(tuple(0.01 * (index + 1) for index in range(USES)), tuple(0.02 * (index + 1) for index in range(USES)))
NOTHING = Computation((0.0,) * USES, (0.0,) * USES)
GRID = Grid.of_nodes(3, 2)


def job(flags: str = "", microbatches: int = 1) -> Job:
    config = resolve(parse_flags(f"{FLAGS} {flags}".split()), GRID.world_size, GRID.ranks_per_node)
    model = ModelShape(config.model, 384)
    return Job(model.unit_specs(), model.uses(), sharding_of(config), GRID, microbatches)


def machine(inter: LinkSpeed = INFINITE, overlap: Overlap = Overlap.STREAMS, intra: LinkSpeed = INFINITE) -> Machine:
    return Machine(inter, intra, CodecSpeed(), overlap)


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("microbatches", [1, 2, 7])
@pytest.mark.parametrize("recomputes", ["", "--checkpoint-activations --checkpoint-num-layers 2"], ids=["kept", "in chunks"])
def test_over_free_links_a_step_takes_its_computation(overlap: Overlap, microbatches: int, recomputes: str) -> None:
    time = step_time(job(f"{ALL} {recomputes}", microbatches), machine(overlap=overlap), COMPUTATION)
    assert time.seconds == pytest.approx(microbatches * COMPUTATION.seconds)
    assert time.computing == pytest.approx(time.seconds)


@pytest.mark.parametrize("flags", ["", ALL, LEAN])
def test_without_overlap_times_add(flags: str) -> None:
    some = job(flags, microbatches=2)
    traffic = planned_traffic(some.unit_specs, some.uses, some.sharding, GRID, 2)
    time = step_time(some, machine(LinkSpeed(1e6, 1e-3), Overlap.NONE, LinkSpeed(1e7, 1e-3)), COMPUTATION)
    between, within = traffic.total.inter_bytes * 2 / 1e6, traffic.total.intra_bytes / 1e7
    assert time.inter_link == pytest.approx(between)
    assert time.intra_link == pytest.approx(within)
    assert time.seconds == pytest.approx(between + within + 2 * COMPUTATION.seconds + 1e-3 * traffic.collectives)


@given(
    log_rate=st.floats(3, 9),
    flags=st.sampled_from(["", ALL, LEAN, "--zero-quantized-gradients"]),
    overlap=st.sampled_from(list(Overlap)),
    microbatches=st.integers(1, 4),
)
@settings(max_examples=40)
def test_a_step_takes_what_is_busiest_and_at_most_everything_in_turn(
    log_rate: float, flags: str, overlap: Overlap, microbatches: int
) -> None:
    time = step_time(job(flags, microbatches), machine(LinkSpeed(10**log_rate), overlap, LinkSpeed(1e8)), COMPUTATION)
    parts = (time.computing, time.inter_link, time.intra_link, time.codecs)
    assert max(parts) * (1 - 1e-9) <= time.seconds <= sum(parts) * (1 + 1e-9)


@given(log_rate=st.floats(4, 8), faster=st.floats(1.0, 10.0), overlap=st.sampled_from(list(Overlap)))
@settings(max_examples=30)
def test_a_faster_link_never_makes_a_step_slower_where_the_order_of_hops_is_fixed(log_rate: float, faster: float, overlap: Overlap) -> None:
    # The thread's hops of several lanes start in an order that depends on the rate; what that may cost is one hop.
    slow, fast = (step_time(job(), machine(LinkSpeed(10**log_rate * factor), overlap), COMPUTATION).seconds for factor in (1.0, faster))
    slack = 0.05 if overlap is Overlap.THREAD else 1e-9
    assert fast <= slow * (1 + slack)


@pytest.mark.parametrize("overlap", list(Overlap))
def test_every_further_microbatch_costs_the_same(overlap: Overlap) -> None:
    times = [step_time(job(ALL, count), machine(LinkSpeed(1e6), overlap), COMPUTATION).seconds for count in (3, 4, 5, 40)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    assert times[3] == pytest.approx(times[0] + 37 * (times[1] - times[0]))


def test_where_links_are_all_that_takes_time_the_speedup_is_that_of_the_bytes() -> None:
    plain, all_of_it = job(), job(ALL)
    bytes_of = [planned_traffic(some.unit_specs, some.uses, some.sharding, GRID, 1).total.inter_bytes for some in (plain, all_of_it)]
    times = [step_time(some, machine(LinkSpeed(1e6)), NOTHING).seconds for some in (plain, all_of_it)]
    assert times[0] / times[1] == pytest.approx(bytes_of[0] / bytes_of[1])


def test_codecs_take_computations_time_on_the_thread_of_lanes_and_their_own_on_streams() -> None:
    coded = replace(machine(), codec=CodecSpeed(1e-9, 1e-9, 1e-9))
    beside = step_time(job(ALL), coded, COMPUTATION)
    within = step_time(job(ALL), replace(coded, overlap=Overlap.THREAD), COMPUTATION)
    assert within.seconds == pytest.approx(COMPUTATION.seconds + within.codecs)
    assert COMPUTATION.seconds <= beside.seconds < within.seconds
    assert step_time(job(), coded, COMPUTATION).codecs == 0


@pytest.mark.parametrize("overlap", list(Overlap))
def test_every_kind_of_a_codecs_work_takes_its_own_time(overlap: Overlap) -> None:
    some = job(LEAN, microbatches=2)
    kinds = [field.name for field in fields(CodecSpeed)]
    each = {kind: step_time(some, replace(machine(overlap=overlap), codec=CodecSpeed(**{kind: 1e-9})), NOTHING).codecs for kind in kinds}
    assert all(each[kind] > 0 for kind in ("encode", "summed", "gaussian_encode", "gaussian_decode", "rotate", "subtract"))
    assert each["rotate"] == pytest.approx(each["gaussian_encode"] + each["gaussian_decode"])  # one round of each value
    together = step_time(some, replace(machine(overlap=overlap), codec=CodecSpeed(*(1e-9 for _ in kinds))), NOTHING)
    assert together.codecs == pytest.approx(sum(each.values()))


def test_more_rounds_of_rotation_take_longer() -> None:
    coded = replace(machine(), codec=CodecSpeed(rotate=1e-9))
    codecs = [step_time(job(f"{LEAN} --zero-quantized-gradients-inter-bits {bits}"), coded, COMPUTATION).codecs for bits in (2, 3)]
    assert codecs[0] > codecs[1]


def test_gaussian_codes_of_quantized_gradients_count_as_an_exchange_of_quantized_values() -> None:
    slow = replace(machine(LinkSpeed(1e6)), inter_exchange_efficiency=0.5)
    times = [step_time(job(LEAN), some, COMPUTATION).inter_link for some in (machine(LinkSpeed(1e6)), slow)]
    assert 1.9 * times[0] < times[1] < 2 * times[0]  # a unit of norms alone has no value that is quantized


def test_a_codec_that_takes_longer_takes_longer_for_everything() -> None:
    assert CodecSpeed(*range(1, 8)).times(2) == CodecSpeed(*range(2, 16, 2))


# ---- ranks that share layers

BLOCKING = LinkWork(blocking_bytes=1000, collectives=2)
BESIDE = LinkWork(overlapped_bytes=1000, collectives=1)


def shared(forward: LinkWork, backward: LinkWork, microbatches: int = 2) -> Job:
    return replace(job(microbatches=microbatches), tensor_work=LinkWorkOfUses((forward,) * USES, (backward,) * USES))


@pytest.mark.parametrize("overlap", list(Overlap))
def test_computation_waits_for_what_blocks_it_and_for_each_collective(overlap: Overlap) -> None:
    tensor = LinkSpeed(1e6, 1e-4)
    time = step_time(shared(BLOCKING, BLOCKING), replace(machine(overlap=overlap), tensor=tensor), COMPUTATION)
    waiting = 2 * 2 * USES * (1e-3 + 2e-4)
    assert time.tensor_link == pytest.approx(waiting)
    assert time.seconds == pytest.approx(2 * COMPUTATION.seconds + waiting)
    assert time.busy["tensor link"] == time.tensor_link


def test_what_runs_beside_computation_costs_only_what_a_forward_does_not_hide() -> None:
    fast, slow = (step_time(shared(BESIDE, BESIDE), replace(machine(), tensor=LinkSpeed(rate)), COMPUTATION) for rate in (1e6, 1e4))
    assert fast.seconds == pytest.approx(2 * COMPUTATION.seconds)
    assert slow.seconds == pytest.approx(2 * (COMPUTATION.seconds + 2 * sum(max(0.0, 0.1 - hidden) for hidden in COMPUTATION.forward)))


def test_climbs_wait_behind_what_runs_beside_computation() -> None:
    slow = machine(intra=LinkSpeed(1e5))  # the busiest part
    free, taken = (step_time(some, slow, COMPUTATION) for some in (job(microbatches=2), shared(BESIDE, BESIDE)))
    assert taken.seconds == pytest.approx(free.seconds + taken.tensor_link) and taken.tensor_link > 0


def test_without_a_speed_of_its_own_the_tensor_link_has_that_of_the_link_inside_a_node_and_climbs_wait_for_it() -> None:
    intra = LinkSpeed(1e6)
    assert machine(intra=intra).tensor_link == intra
    alone, beside = (step_time(some, machine(intra=intra), NOTHING) for some in (job(microbatches=2), shared(BLOCKING, BLOCKING)))
    assert beside.seconds > alone.seconds
    assert beside.intra_link == pytest.approx(alone.intra_link)


def test_ranks_that_share_nothing_have_no_tensor_link_among_the_parts_that_are_busy() -> None:
    assert "tensor link" not in step_time(job(), machine(), COMPUTATION).busy


# ---- a link with a latency

LATENCY = LinkSpeed(float("inf"), latency_seconds=0.05)


def test_a_gather_takes_the_latency_for_every_other_node_and_an_exchange_takes_it_once() -> None:
    """Three nodes: six units climb in two rounds and descend in one, and two gathers of numbers have two rounds."""
    time = step_time(job("--zero-stage 1"), machine(LATENCY, Overlap.NONE), COMPUTATION)
    rounds = 2 * USES + USES + 2 * 2
    assert time.latency == pytest.approx(0.05 * rounds) and time.busy["latency between nodes"] == time.latency
    assert time.seconds == pytest.approx(COMPUTATION.seconds + 0.05 * rounds)
    assert time.inter_link == 0


@pytest.mark.parametrize("overlap", list(Overlap))
def test_a_step_waits_at_least_for_its_numbers_and_one_node_has_no_latency(overlap: Overlap) -> None:
    for grid, expected in ((GRID, 0.2), (Grid.of_nodes(1, 6), 0.0)):
        near, far = (step_time(replace(job(), grid=grid), machine(link, overlap), COMPUTATION) for link in (INFINITE, LATENCY))
        assert far.seconds >= near.seconds + expected - 1e-9 and (far.seconds == near.seconds) == (expected == 0)


def test_hops_of_one_lane_wait_for_each_others_latency_and_those_of_other_lanes_do_not() -> None:
    alone, all_lanes = (step_time(job(), machine(LATENCY, overlap), NOTHING) for overlap in (Overlap.NONE, Overlap.STREAMS))
    assert all_lanes.latency == alone.latency and all_lanes.seconds < alone.seconds


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 0), (6, 2 * USES * 2 * 2)])
def test_exchanges_of_ranks_that_divide_samples_take_the_latency_once_each_where_they_are_on_several_nodes(ranks: int, rounds: int) -> None:
    """In two micro-batches each use has two collectives in forward and two in backward."""
    some = divided(replace(GRID, context_ranks=ranks))
    near, far = (step_time(some, machine(LinkSpeed(1e9, latency_seconds=latency)), COMPUTATION) for latency in (0.0, 0.05))
    assert far.context_link == pytest.approx(near.context_link + 0.05 * rounds)


# ---- ranks that divide samples


def divided(grid: Grid, microbatches: int = 2) -> Job:
    work = LinkWorkOfUses((BLOCKING,) * USES, (BLOCKING,) * USES)
    return replace(job(microbatches=microbatches), grid=grid, context_work=work)


@pytest.mark.parametrize("overlap", list(Overlap))
def test_computation_waits_for_the_exchange_of_heads_at_the_rate_of_the_link_that_joins_the_ranks(overlap: Overlap) -> None:
    """Of 1000 bytes from 5 others on 3 nodes of 2 ranks, 800 come from other nodes, for each of 2 ranks."""
    inside, between = LinkSpeed(1e6, 1e-4), LinkSpeed(2e6, 3e-4)
    within, across = (
        step_time(divided(replace(GRID, context_ranks=ranks)), machine(between, overlap, inside), COMPUTATION) for ranks in (2, 6)
    )
    waits = 2 * 2 * USES
    assert within.context_link == pytest.approx(waits * (1e-3 + 2e-4))
    assert across.context_link == pytest.approx(waits * (2 * 8e-4 / 2 + 6e-4))
    assert within.busy["context link"] == within.context_link and "context link" not in step_time(job(), machine(), COMPUTATION).busy


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize(("hiding", "hidden"), [(0.0, 0.0), (0.2, 0.1), (0.5, 0.25), (1.0, 0.25)])
def test_computation_waits_for_an_exchange_of_backward_but_for_what_one_product_hides(
    hiding: float, hidden: float, overlap: Overlap
) -> None:
    """0.25 s of exchanges in forward; in backward 0.5 s, and 0.25 s beside a product of `hiding` x 0.5 s."""
    rate = 4 * 10**15  # so fast that weights and gradients take no time
    forward, backward = LinkWork(10**15, collectives=2), LinkWork(2 * 10**15, 10**15, collectives=2)
    work = LinkWorkOfUses((forward,) * USES, (backward,) * USES, hiding)
    some = replace(job(), grid=replace(GRID, context_ranks=2), context_work=work)
    computation = Computation((0.5,) * USES, (1.0,) * USES)
    time = step_time(some, machine(overlap=overlap, intra=LinkSpeed(rate)), computation)
    assert time.seconds == pytest.approx(USES * (0.5 + 1.0 + 0.25 + 0.5 + 0.25 - hidden))
    assert time.context_link == pytest.approx(USES * 1.0)


@pytest.mark.parametrize(("ranks", "link"), [(2, "intra"), (6, "intra"), (6, "inter")])
def test_climbs_wait_behind_the_exchange_of_heads_on_each_link_that_it_takes(ranks: int, link: str) -> None:
    slow, grid = replace(machine(), **{link: LinkSpeed(1e6)}), replace(GRID, context_ranks=ranks)
    free, taken = (step_time(some, slow, NOTHING) for some in (replace(job(microbatches=2), grid=grid), divided(grid)))
    assert taken.seconds == pytest.approx(free.seconds + taken.context_link) and taken.context_link > 0
    assert (taken.inter_link, taken.intra_link) == pytest.approx((free.inter_link, free.intra_link))


# ---- an optimizer on the host

OFFLOADED = "--optimizer-cpu-offload"
HOST = HostSpeed(bytes_per_second=1e6, values_per_second=1e6)


def owned(some: Job) -> list[int]:
    """Elements of each unit that a rank owns."""
    return [FlatLayout(spec.params, GRID.data_ranks, some.sharding.block_numel).slice_numel for spec in some.unit_specs]


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("flags", ["", ALL, LEAN, "--zero-stage 1"])
def test_a_host_updates_unit_after_unit_and_copies_each_once_in_each_direction(flags: str, overlap: Overlap) -> None:
    some = job(f"{flags} {OFFLOADED}", microbatches=2)
    time = step_time(some, replace(machine(overlap=overlap), host=HOST), COMPUTATION)
    codes = some.sharding.policy.in_world(GRID.ladder).weight_codes
    runs = [FlatLayout(spec.params, GRID.data_ranks, some.sharding.block_numel).runs for spec in some.unit_specs]
    up = sum(some.sharding.payload_bytes(codes.inter, run) for run in runs)
    assert time.host == pytest.approx(sum(owned(some)) * GRID.ranks_per_node / 1e6)
    assert time.host_link == pytest.approx((4 * sum(owned(some)) + up) / 1e6)
    in_turn = 2 * COMPUTATION.seconds + time.host
    assert in_turn - sum(COMPUTATION.forward) <= time.seconds <= in_turn + time.host_link


def test_only_the_first_unit_s_gradients_are_waited_for_if_updates_take_longer_than_copies() -> None:
    some = job(OFFLOADED)
    payloads_and_first = max(owned(some)) * 4 / 4e9 + sum(owned(some)) * 2 / 4e9
    time = step_time(some, replace(machine(), host=HostSpeed(4e9, 1e6)), NOTHING)
    assert time.host < time.seconds <= time.host + payloads_and_first * 1.01


@pytest.mark.parametrize("values_per_second", [1e4, 1e6, 1e7])
@pytest.mark.parametrize("row", ["", ALL, "--zero-stage 1"])
def test_updates_hide_behind_the_uses_of_the_first_forward_that_have_been_enqueued(row: str, values_per_second: float) -> None:
    some = job(f"{row} {OFFLOADED}", microbatches=2)
    updating = [numel * GRID.ranks_per_node / values_per_second for numel in owned(some)]  # units are used in their order
    ahead = some.sharding.prefetch.inter_uses
    computed = 0.0
    for use, seconds in enumerate(COMPUTATION.forward):
        computed = max(computed, sum(updating[: use + 1 + ahead])) + seconds
    time = step_time(some, replace(machine(), host=HostSpeed(1e12, values_per_second)), COMPUTATION)
    assert time.seconds == pytest.approx(computed + 2 * COMPUTATION.seconds - sum(COMPUTATION.forward), rel=1e-3)


# ---- kept inputs on the host

BLOCKS = 4
KEPT = Computation((0.0, *[0.1] * BLOCKS, 0.0), (0.0, *[0.3] * BLOCKS, 0.0))


def kept_job(part_bytes: int, *, is_divided: bool = False, blocks_of_chunk: int = 1, microbatches: int = 2) -> Job:
    recomputed = f"--recompute-granularity full --recompute-method uniform --recompute-num-layers {blocks_of_chunk}"
    return replace(job(recomputed, microbatches), kept_on_host=KeptOnHost(part_bytes, is_divided=is_divided))


def kept_time(some: Job, rate: float = 1e6) -> StepTime:
    return step_time(some, replace(machine(), host=HostSpeed(rate, 1e6)), KEPT)


@pytest.mark.parametrize("is_divided", [False, True], ids=["whole", "divided"])
@pytest.mark.parametrize("blocks_of_chunk", [1, 3])
def test_each_kept_input_crosses_the_host_link_once_in_each_direction_and_micro_batch(blocks_of_chunk: int, is_divided: bool) -> None:
    chunks = math.ceil(BLOCKS / blocks_of_chunk)
    time = kept_time(kept_job(50_000, is_divided=is_divided, blocks_of_chunk=blocks_of_chunk, microbatches=7))
    assert time.host_link == pytest.approx(7 * chunks * 2 * 0.05)
    assert time.busy["link to the host"] == time.host_link


@pytest.mark.parametrize(("copy", "waited"), [(0.02, 0.02), (0.1, 0.1), (0.25, 0.15 * (BLOCKS - 1) + 0.15 + 0.25)])
def test_copies_of_kept_inputs_hide_behind_their_chunks_but_for_the_first_one_up(copy: float, waited: float) -> None:
    """A copy down hides behind the forward of its chunk, 0.1 s, and a copy up behind the backward of a chunk, 0.3 s."""
    time = kept_time(kept_job(round(copy * 1e6)))
    assert time.seconds == pytest.approx(2 * (KEPT.seconds + waited))


def test_copies_up_that_take_longer_than_backward_are_what_backward_waits_for() -> None:
    down, up = 0.4, 0.4
    time = kept_time(kept_job(400_000))
    assert time.seconds == pytest.approx(2 * (BLOCKS * (down + up) + 0.3))


def test_divided_inputs_come_up_two_chunks_ahead() -> None:
    whole, divided = (kept_time(kept_job(50_000, is_divided=is_divided)) for is_divided in (False, True))
    assert divided.seconds == pytest.approx(whole.seconds + 2 * 0.05)  # the first two inputs are waited for


def test_without_a_host_no_input_is_copied() -> None:
    assert step_time(kept_job(50_000), machine(), KEPT) == step_time(replace(kept_job(0)), machine(), KEPT)


def test_an_optimizer_whose_device_is_the_host_takes_the_time_of_one_that_is_not_offloaded() -> None:
    assert step_time(job(OFFLOADED), machine(LinkSpeed(1e6)), COMPUTATION) == step_time(job(), machine(LinkSpeed(1e6)), COMPUTATION)
