"""What a clock makes of short programs: what waits for what, what runs beside what, and which part of a machine takes the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.comm.ledger import Traffic
from megatron_zpp.comm.links import INTER_CLIMB, INTER_DESCEND, INTRA_CLIMB
from megatron_zpp.ops.planned import CodecWork
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Direction, Lane, Link
from megatron_zpp.training.plan.clock import StepTime, step_time
from megatron_zpp.training.plan.machine import CodecSpeed, HostSpeed, LinkSpeed, Machine, Overlap, SocketSpeed
from megatron_zpp.training.plan.program import (
    COMPUTATION,
    Arrived,
    Await,
    ComeDown,
    Compute,
    Copy,
    Cross,
    Follow,
    GatherNumbers,
    Item,
    Mark,
    Submit,
    UpdateOnHost,
    Wait,
)

pytestmark = pytest.mark.pure

INFINITE = LinkSpeed(float("inf"))
GRID = Grid.of_nodes(3, 2)
EVERY_OVERLAP = pytest.mark.parametrize("overlap", list(Overlap))
TENSOR, CONTEXT = (Lane(link, Direction.CLIMB) for link in (Link.TENSOR, Link.CONTEXT))
SIDE = 1  # a stream beside computation


@dataclass(frozen=True)
class Program:
    """`forward` in every micro-batch, then `update` once. A Compute of 1 takes a second on the machines below."""

    forward: tuple[Item, ...]
    update: tuple[Item, ...] = ()
    microbatches: int = 1

    def items(self, microbatches: int) -> Iterator[Item]:
        for _ in range(microbatches):
            yield from self.forward
        yield from self.update


def machine(inter: LinkSpeed = INFINITE, overlap: Overlap = Overlap.STREAMS, intra: LinkSpeed = INFINITE) -> Machine:
    return Machine(inter, intra, CodecSpeed(), overlap, flops_per_second=1.0)


def time_of(*items: Item, on: Machine, grid: Grid = GRID) -> StepTime:
    return step_time(Program(items), grid, on)


def between(nbytes: int, **more: object) -> Submit:
    """A climb that brings so many bytes into a node of GRID."""
    return Submit(INTER_CLIMB, Traffic(inter_bytes=nbytes // 2), **more)  # type: ignore[arg-type]


def climbs(seconds: float) -> tuple[Submit, Wait]:
    """A climb that takes so long at 1e6 bytes per second, and is waited for."""
    return between(round(seconds * 1e6)), Wait(INTER_CLIMB, 0)


SLOW = LinkSpeed(1e6)


# ---- computation and hops


@EVERY_OVERLAP
@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_over_free_links_a_step_takes_its_computation(overlap: Overlap, microbatches: int) -> None:
    program = Program(
        (*climbs(1), Compute(2), Submit(INTER_DESCEND, Traffic(4, 4))), (Wait(INTER_DESCEND, 0), GatherNumbers()), microbatches
    )
    time = step_time(program, GRID, machine(overlap=overlap))
    assert time.seconds == time.computing == pytest.approx(2 * microbatches)


def test_without_overlap_times_add_and_each_collective_costs_its_constant() -> None:
    program = (
        between(3_000_000),
        Compute(1),
        Submit(INTRA_CLIMB, Traffic(intra_bytes=5_000_000)),
        Wait(INTRA_CLIMB, 0),
        Submit(INTER_CLIMB, Traffic()),
    )
    time = time_of(*program, on=machine(LinkSpeed(1e6, 0.25), Overlap.NONE, LinkSpeed(1e7, 0.5)))
    assert (time.inter_link, time.intra_link, time.computing) == (3, 0.5, 1)
    assert time.seconds == pytest.approx(3 + 0.25 + 1 + 0.5 + 0.5)  # a hop without bytes is no collective


@pytest.mark.parametrize("overlap", [Overlap.STREAMS, Overlap.THREAD])
def test_a_hop_hides_behind_computation_until_it_is_waited_for(overlap: Overlap) -> None:
    submit, wait = climbs(3)
    assert time_of(submit, Compute(4), wait, on=machine(SLOW, overlap)).seconds == 4
    assert time_of(submit, Compute(2), wait, on=machine(SLOW, overlap)).seconds == 3
    assert time_of(submit, wait, Compute(2), on=machine(SLOW, overlap)).seconds == 5


@pytest.mark.parametrize("overlap", [Overlap.STREAMS, Overlap.THREAD])
def test_a_link_carries_one_hop_at_a_time_and_both_links_work_beside_each_other(overlap: Overlap) -> None:
    inter, intra = between(1_000_000), Submit(INTRA_CLIMB, Traffic(intra_bytes=1_000_000))
    same = time_of(inter, replace(inter, lane=INTER_DESCEND), Wait(INTER_CLIMB, 0), Wait(INTER_DESCEND, 0), on=machine(SLOW, overlap, SLOW))
    other = time_of(inter, intra, Wait(INTER_CLIMB, 0), Wait(INTRA_CLIMB, 0), on=machine(SLOW, overlap, SLOW))
    assert (same.seconds, other.seconds) == (2, 1)


@pytest.mark.parametrize("overlap", [Overlap.STREAMS, Overlap.THREAD])
def test_a_hop_waits_for_the_one_that_it_follows(overlap: Overlap) -> None:
    intra = Submit(INTRA_CLIMB, Traffic(intra_bytes=1_000_000), follows_on=INTER_CLIMB)
    behind_another = replace(intra, follows=1)  # it follows the hop before the latest one
    one, two = between(1_000_000), between(5_000_000)
    assert time_of(one, intra, Wait(INTRA_CLIMB, 0), on=machine(SLOW, overlap, SLOW)).seconds == 2
    assert time_of(one, two, behind_another, Wait(INTRA_CLIMB, 0), Wait(INTER_CLIMB, 0), on=machine(SLOW, overlap, SLOW)).seconds == 6


def test_a_wait_counts_back_from_the_latest_hop_of_its_lane() -> None:
    hops = between(1_000_000), between(2_000_000)
    waits = [time_of(*hops, Wait(INTER_CLIMB, back), Compute(10), on=machine(SLOW)).seconds for back in (0, 1)]
    assert waits == [13, 11]


def test_what_a_step_submits_for_the_next_one_is_under_way_when_it_begins() -> None:
    submit, wait = climbs(3)
    assert time_of(wait, Compute(5), submit, Compute(2), on=machine(SLOW)).seconds == 8  # 2 of 3 seconds are hidden
    assert time_of(wait, Compute(5), submit, Compute(4), on=machine(SLOW)).seconds == 9


@EVERY_OVERLAP
def test_every_further_microbatch_costs_the_same(overlap: Overlap) -> None:
    program = Program((*climbs(2), Compute(1), Submit(INTER_DESCEND, Traffic(500_000))), (Wait(INTER_DESCEND, 0),))
    times = [step_time(replace(program, microbatches=count), GRID, machine(SLOW, overlap)).seconds for count in (3, 4, 5, 40)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    assert times[3] == pytest.approx(times[0] + 37 * (times[1] - times[0]))


# ---- programs of any order

HOPS = st.builds(
    lambda lane, nbytes, encoded, decoded: Submit(
        lane,
        Traffic(inter_bytes=nbytes) if lane.link is Link.INTER else Traffic(intra_bytes=nbytes),
        before=CodecWork(encoded=encoded),
        after=CodecWork(decoded=decoded),
    ),
    st.sampled_from([INTER_CLIMB, INTRA_CLIMB, INTER_DESCEND]),
    *(st.integers(0, 1000) for _ in range(3)),
)
PROGRAMS = st.lists(
    st.one_of(
        HOPS, st.builds(Compute, st.integers(1, 1000)), st.builds(Wait, st.sampled_from([INTER_CLIMB, INTRA_CLIMB]), st.integers(0, 2))
    ),
    max_size=12,
)
ALL_WAITS = tuple(Wait(lane, 0) for lane in (INTER_CLIMB, INTRA_CLIMB, INTER_DESCEND))
CODED = replace(machine(LinkSpeed(0.7), intra=LinkSpeed(1.3)), codec=CodecSpeed(encoded=0.2, decoded=0.3), socket=SocketSpeed(0.1, 0.4))


@given(items=PROGRAMS, overlap=st.sampled_from(list(Overlap)), microbatches=st.integers(1, 3))
@settings(max_examples=100)
def test_a_step_takes_what_is_busiest_and_at_most_everything_in_turn(items: list[Item], overlap: Overlap, microbatches: int) -> None:
    time = step_time(Program((*items, *ALL_WAITS), microbatches=microbatches), GRID, replace(CODED, overlap=overlap))
    parts = list(time.busy.values())
    assert max(parts) * (1 - 1e-9) <= time.seconds <= sum(parts) * (1 + 1e-9)


@given(items=PROGRAMS, faster=st.floats(1.0, 10.0), overlap=st.sampled_from([Overlap.STREAMS, Overlap.NONE]))
@settings(max_examples=60)
def test_a_faster_link_never_makes_a_step_slower_where_the_order_of_hops_is_fixed(
    items: list[Item], faster: float, overlap: Overlap
) -> None:
    slow = replace(CODED, overlap=overlap)
    fast = replace(slow, inter=LinkSpeed(slow.inter.bytes_per_second * faster))
    assert time_of(*items, *ALL_WAITS, on=fast).seconds <= time_of(*items, *ALL_WAITS, on=slow).seconds * (1 + 1e-9)


# ---- codecs and sockets

BOTH_CODED = Submit(INTER_CLIMB, Traffic(inter_bytes=1), before=CodecWork(encoded=1), after=CodecWork(decoded=2)), Wait(INTER_CLIMB, 0)


def test_codecs_take_computations_time_on_the_thread_of_lanes_and_their_own_on_streams() -> None:
    submit, wait = BOTH_CODED
    coded = replace(machine(), codec=CodecSpeed(encoded=1, decoded=1))
    within = replace(coded, overlap=Overlap.THREAD)
    assert [time_of(submit, Compute(10), wait, on=on).seconds for on in (coded, within)] == [10, 13]
    assert [time_of(submit, wait, Compute(10), on=on).seconds for on in (coded, within)] == [13, 13]  # here computation waits anyway
    assert time_of(submit, Compute(10), wait, on=machine()).codecs == 0


@EVERY_OVERLAP
@pytest.mark.parametrize("kind", [field.name for field in fields(CodecWork)])
def test_every_kind_of_a_codecs_work_takes_its_own_time(kind: str, overlap: Overlap) -> None:
    work = CodecWork(**{field.name: 10**place for place, field in enumerate(fields(CodecWork))})
    on = replace(machine(overlap=overlap), codec=CodecSpeed(**{kind: 2.0}))
    found = time_of(Submit(INTER_CLIMB, Traffic(), before=work, after=work), Wait(INTER_CLIMB, 0), on=on)
    assert found.codecs == found.seconds == 2 * 2 * getattr(work, kind)


def test_an_exchange_of_codes_has_its_own_share_of_the_link_between_nodes() -> None:
    slow = replace(machine(SLOW), inter_exchange_efficiency=0.5)
    plain, coded, gaussian = (
        between(1_000_000),
        between(1_000_000, before=CodecWork(encoded=1)),
        between(1_000_000, before=CodecWork(gaussian_encoded=1)),
    )
    assert [time_of(hop, Wait(INTER_CLIMB, 0), on=slow).inter_link for hop in (plain, coded, gaussian)] == [1, 2, 2]
    inside = Submit(INTRA_CLIMB, Traffic(intra_bytes=1_000_000), before=CodecWork(encoded=1))
    assert time_of(inside, Wait(INTRA_CLIMB, 0), on=replace(slow, intra=SLOW)).intra_link == 1


def test_a_codec_that_takes_longer_takes_longer_for_everything_and_so_does_a_socket() -> None:
    assert CodecSpeed(*range(1, 8)).times(2) == CodecSpeed(*range(2, 16, 2))
    assert SocketSpeed(1, 2).times(3) == SocketSpeed(3, 6)


SENT = replace(machine(overlap=Overlap.THREAD), socket=SocketSpeed(gathered=1e-6, exchanged=3e-6))


def test_what_a_rank_receives_takes_time_of_the_cores_that_compute() -> None:
    gathered, exchanged = Traffic(inter_bytes=500_000, intra_bytes=500_000), Traffic(inter_bytes=1_000_000)
    hops = Submit(INTER_CLIMB, gathered), Submit(INTER_DESCEND, exchanged)
    time = time_of(*hops, Compute(10), Wait(INTER_CLIMB, 0), Wait(INTER_DESCEND, 0), on=SENT)
    assert time.sockets == time.busy["sending and receiving"] == pytest.approx(1 + 3)
    assert time.seconds == pytest.approx(10 + 4)


def test_a_payload_is_sent_and_received_while_it_crosses_its_link() -> None:
    submit = Submit(INTER_CLIMB, Traffic(inter_bytes=1_000_000))  # 2e6 bytes into a node: 2 seconds at 1e6 per second
    assert time_of(submit, Wait(INTER_CLIMB, 0), on=replace(SENT, inter=SLOW)).seconds == pytest.approx(2)
    assert time_of(submit, Wait(INTER_CLIMB, 0), on=replace(SENT, inter=LinkSpeed(1e7))).seconds == pytest.approx(1)


# ---- ranks that share layers or divide samples


def crossing(nbytes: int, *, stream: int = COMPUTATION) -> Cross:
    return Cross(stream, TENSOR, Traffic(tensor_bytes=nbytes))


@EVERY_OVERLAP
def test_computation_waits_for_what_blocks_it_and_for_each_collective(overlap: Overlap) -> None:
    on = replace(machine(overlap=overlap), tensor=LinkSpeed(1e6, 0.25))
    time = time_of(Compute(1), crossing(1_000_000), Compute(1), crossing(500_000), on=on)
    assert time.tensor_link == time.busy["tensor link"] == pytest.approx(1.5 + 2 * 0.25)
    assert time.seconds == pytest.approx(2 + 2.0)


@pytest.mark.parametrize(("computed", "seconds"), [(0.5, 1), (2, 2)])
def test_what_runs_beside_computation_costs_only_what_is_not_hidden_where_it_is_awaited(computed: float, seconds: float) -> None:
    items = (
        Mark(COMPUTATION),
        Await(SIDE, COMPUTATION, 0),
        crossing(1_000_000, stream=SIDE),
        Mark(SIDE),
        Compute(computed),
        Await(COMPUTATION, SIDE, 0),
    )
    assert time_of(*items, on=replace(machine(), tensor=SLOW)).seconds == seconds
    follows = Follow(SIDE, COMPUTATION), crossing(1_000_000, stream=SIDE), Compute(computed), Follow(COMPUTATION, SIDE)
    assert time_of(*follows, on=replace(machine(), tensor=SLOW)).seconds == seconds


def test_an_await_counts_back_from_the_latest_mark() -> None:
    marked = Follow(SIDE, COMPUTATION), Mark(SIDE), crossing(5_000_000, stream=SIDE), Mark(SIDE)
    computed = [(*marked, Await(COMPUTATION, SIDE, back), Compute(1), Follow(COMPUTATION, SIDE)) for back in (1, 0)]
    assert [time_of(*items, on=replace(machine(), tensor=SLOW)).seconds for items in computed] == [5, 6]


def test_climbs_wait_behind_what_ranks_that_share_layers_send_on_the_link_inside_a_node() -> None:
    climb = Submit(INTRA_CLIMB, Traffic(intra_bytes=2_000_000))
    free = time_of(climb, Wait(INTRA_CLIMB, 0), on=machine(intra=SLOW))
    taken = time_of(crossing(1_000_000, stream=SIDE), climb, Wait(INTRA_CLIMB, 0), on=machine(intra=SLOW))
    assert (free.seconds, taken.seconds, taken.tensor_link, taken.intra_link) == (2, 3, 1, 2)


def test_without_a_speed_of_its_own_the_tensor_link_has_that_of_the_link_inside_a_node() -> None:
    assert machine(intra=SLOW).tensor_link == SLOW
    assert replace(machine(intra=SLOW), tensor=INFINITE).tensor_link == INFINITE


def test_parts_that_have_nothing_to_do_are_not_among_those_that_are_busy() -> None:
    assert set(time_of(Compute(1), on=machine()).busy) == {"computation", "link between nodes", "link inside a node", "codecs"}


@EVERY_OVERLAP
def test_an_exchange_of_heads_takes_the_rate_of_the_slowest_link_between_its_ranks(overlap: Overlap) -> None:
    """Of 1e6 bytes from others, none or 8e5 come from other nodes, for each of 2 ranks of a node."""
    on = machine(LinkSpeed(2e6, 0.25, latency_seconds=0.05), overlap, LinkSpeed(1e6, 0.125))
    within = time_of(Cross(COMPUTATION, CONTEXT, Traffic(context_bytes=1_000_000)), on=on)
    across = time_of(Cross(COMPUTATION, CONTEXT, Traffic(context_bytes=1_000_000, context_inter_bytes=800_000)), on=on)
    assert within.seconds == within.context_link == pytest.approx(1 + 0.125)
    assert across.seconds == across.context_link == across.busy["context link"] == pytest.approx(0.8 + 0.25 + 0.05)


@pytest.mark.parametrize(("inter_bytes", "link"), [(0, "intra"), (500_000, "intra"), (500_000, "inter")])
def test_climbs_wait_behind_the_exchange_of_heads_on_each_link_that_it_takes(inter_bytes: int, link: str) -> None:
    on = replace(machine(), **{link: SLOW})
    heads = Cross(COMPUTATION, CONTEXT, Traffic(context_bytes=1_000_000, context_inter_bytes=inter_bytes))
    climb = between(1_000_000) if link == "inter" else Submit(INTRA_CLIMB, Traffic(intra_bytes=1_000_000))
    time = time_of(replace(heads, stream=SIDE), climb, Wait(climb.lane, 0), on=on)
    assert time.context_link > 0 and time.seconds == pytest.approx(1 + time.context_link)


# ---- a link with a latency

LATENCY = LinkSpeed(float("inf"), latency_seconds=0.5)


@EVERY_OVERLAP
def test_a_gather_takes_the_latency_for_every_other_node_and_an_exchange_takes_it_once(overlap: Overlap) -> None:
    climb, descent = between(2), Submit(INTER_DESCEND, Traffic(inter_bytes=1))
    on = machine(LATENCY, overlap)
    assert time_of(climb, Wait(INTER_CLIMB, 0), on=on).seconds == 2 * 0.5
    assert time_of(descent, Wait(INTER_DESCEND, 0), on=on).seconds == 0.5
    assert time_of(GatherNumbers(), Compute(1), on=on).seconds == 1 + 2 * 0.5
    one_node = [climb, Wait(INTER_CLIMB, 0), GatherNumbers()]
    assert time_of(*one_node, on=on, grid=Grid.of_nodes(1, 6)).seconds == 0
    time = time_of(climb, descent, *ALL_WAITS, GatherNumbers(), on=on)
    assert time.latency == time.busy["latency between nodes"] == 1 + 0.5 + 1 and time.inter_link == 0


def test_hops_of_one_lane_wait_for_each_others_latency_and_those_of_other_lanes_do_not() -> None:
    climb, descent = between(2), Submit(INTER_DESCEND, Traffic(inter_bytes=1))
    assert time_of(climb, climb, Wait(INTER_CLIMB, 0), on=machine(LATENCY)).seconds == 2
    assert time_of(climb, descent, *ALL_WAITS, on=machine(LATENCY)).seconds == 1


# ---- an optimizer on the host, and inputs that are kept there

HOST = HostSpeed(bytes_per_second=1e6, values_per_second=1e6)
UPDATE = UpdateOnHost(500_000)  # of each of 2 ranks of a node: a second


def on_host(**changes: object) -> Machine:
    return replace(machine(), host=HOST, **changes)  # type: ignore[arg-type]


def test_a_host_updates_after_gradients_have_come_down_and_computation_that_comes_later_waits() -> None:
    time = time_of(Compute(1), GatherNumbers(), ComeDown(3_000_000), Arrived(0), UPDATE, Compute(2), on=on_host())
    assert (time.host_link, time.host) == (3, 1) == (time.busy["link to the host"], time.busy["AdamW on the host"])
    assert time.seconds == pytest.approx(1 + 3 + 1 + 2)


def test_gradients_of_the_next_unit_come_down_during_an_update() -> None:
    first, second = ComeDown(200_000), ComeDown(600_000)
    in_turn = GatherNumbers(), first, Arrived(0), UPDATE, second, Arrived(0), UPDATE
    beside = GatherNumbers(), first, second, Arrived(1), UPDATE, Arrived(0), UPDATE
    assert time_of(*in_turn, Compute(1), on=on_host()).seconds == pytest.approx(0.2 + 1 + 0.6 + 1 + 1)
    assert time_of(*beside, Compute(1), on=on_host()).seconds == pytest.approx(0.2 + 1 + 1 + 1)


def test_the_device_computes_what_has_been_enqueued_while_its_host_updates() -> None:
    assert (
        time_of(GatherNumbers(), UPDATE, Compute(3), UPDATE, Compute(3), on=on_host()).seconds == 1 + 3 + 3
    )  # the second update hides behind computation
    assert time_of(GatherNumbers(), UPDATE, Compute(0.5), UPDATE, Compute(3), on=on_host()).seconds == 1 + 1 + 3


def test_a_climb_from_the_host_is_submitted_after_the_update_and_comes_up_first() -> None:
    hop = between(1_000_000, host_bytes=2_000_000)
    time = time_of(GatherNumbers(), UPDATE, hop, Wait(INTER_CLIMB, 0), Compute(1), on=on_host(inter=SLOW))
    assert (time.seconds, time.host_link) == (1 + 2 + 1 + 1, 2)


def test_the_host_begins_when_it_knows_the_numbers() -> None:
    assert time_of(Compute(4), GatherNumbers(), UPDATE, Compute(1), on=on_host()).seconds == 4 + 1 + 1


def test_copies_in_a_stream_hide_behind_computation_and_each_direction_carries_one_at_a_time() -> None:
    down, up = Copy(SIDE, 1_000_000, down=True), Copy(SIDE + 1, 1_000_000, down=False)
    ends = Follow(COMPUTATION, SIDE), Follow(COMPUTATION, SIDE + 1)
    assert time_of(down, up, *ends, on=on_host()).seconds == 1
    assert time_of(down, replace(down, stream=SIDE + 1), *ends, on=on_host()).seconds == 2
    assert time_of(down, Compute(3), *ends, on=on_host()).seconds == 3


def test_without_a_host_of_its_own_nothing_is_copied_or_updated_there() -> None:
    time = time_of(Copy(COMPUTATION, 1_000_000, down=True), UPDATE, Compute(1), on=machine())
    assert (time.seconds, time.host, time.host_link) == (1, 0, 0)
