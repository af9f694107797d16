from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from harness.fake_streams.machine import Machine
from harness.patience import PATIENCE_SECONDS, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.comm.backend import Work
from megatron_zpp.comm.lanes import Hop, StreamLanes, ThreadLanes, nothing
from megatron_zpp.parallel.topology import LANES, MOST_CROSSING, Lane


class HeldWork:
    """Ends when it is told to; error: how."""

    def __init__(self, error: Exception | None = None) -> None:
        self._ended = threading.Event()
        self._error = error
        self._calls: list[Callable[[], None]] = []

    def end(self) -> None:
        self._ended.set()
        for call in self._calls:
            call()

    def wait(self) -> None:
        assert self._ended.wait(PATIENCE_SECONDS)
        if self._error is not None:
            raise self._error

    def when_ended(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if self._ended.is_set():
            call()


class SlowWork(HeldWork):
    """Ends after a time that counts from when it is waited for."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def when_ended(self, call: Callable[[], None]) -> None:
        super().when_ended(call)
        threading.Timer(self._seconds, self.end).start()


@dataclass
class Diary:
    """What happened to hops, in order."""

    prepared: list[str] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)
    landed: list[str] = field(default_factory=list)

    def hop(self, name: str, lane: Lane, work: Work | None = None, after: Hop | None = None) -> Hop:
        def prepare() -> None:
            if after is not None:
                assert after.name in self.landed
            self.prepared.append(name)

        def launch() -> Work | None:
            assert name in self.prepared
            self.launched.append(name)
            return work

        return Hop(name, lane, launch, lambda: self.landed.append(name), after, prepare=prepare)


def until(is_so: Callable[[], bool]) -> None:
    wait_until(is_so, "it does not happen", pause_seconds=0.0005)


plans = st.lists(st.tuples(st.sampled_from(range(len(LANES))), st.integers(0, 4), st.booleans()), min_size=1, max_size=25)


@settings(max_examples=100)
@given(plans, st.data())
def test_every_lane_launches_and_lands_its_hops_in_the_order_of_submission_and_each_after_the_hop_it_needs(
    plan: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    diary, lanes = Diary(), ThreadLanes()
    hops: list[Hop] = []
    for index, (lane, delay, is_chained) in enumerate(plan):
        after = data.draw(st.sampled_from(hops)) if hops and is_chained else None
        hops.append(diary.hop(f"{index}", LANES[lane], SlowWork(0.0005 * delay) if delay else None, after))
        lanes.submit(hops[-1])
    waited = data.draw(st.sampled_from(hops))
    lanes.wait(waited)
    assert waited.has_landed
    lanes.drain()
    for lane in LANES:
        submitted = [hop.name for hop in hops if hop.lane == lane]
        for happened in (diary.prepared, diary.launched, diary.landed):
            assert [name for name in happened if name in submitted] == submitted


def test_a_lane_has_two_collectives_under_way_and_one_prepared_and_lands_them_in_order() -> None:
    diary, lanes = Diary(), ThreadLanes()
    works = [HeldWork() for _ in range(5)]
    for index, work in enumerate(works):
        lanes.submit(diary.hop(f"{index}", LANES[0], work))
    until(lambda: len(diary.prepared) == MOST_CROSSING + 1)
    works[1].end()  # out of turn: its place on the lane is free, what it brought waits
    until(lambda: len(diary.launched) == 3)
    assert (diary.launched, diary.landed) == (["0", "1", "2"], [])
    works[0].end()
    until(lambda: diary.landed == ["0", "1"])
    until(lambda: len(diary.prepared) == 5)
    assert diary.launched == ["0", "1", "2", "3"]
    for work in works[2:]:
        work.end()
    lanes.drain()
    assert diary.landed == ["0", "1", "2", "3", "4"]


def test_a_collective_starts_before_what_the_one_before_it_brought_is_decoded() -> None:
    diary, lanes = Diary(), ThreadLanes()
    works = [HeldWork() for _ in range(MOST_CROSSING + 1)]
    for index, work in enumerate(works):
        hop = diary.hop(f"{index}", LANES[0], work)
        if index == 0:
            hop.land = lambda: diary.landed.append(f"with {len(diary.launched)} launched")
        lanes.submit(hop)
    until(lambda: len(diary.prepared) == MOST_CROSSING + 1)
    works[0].end()
    until(lambda: bool(diary.landed))
    assert diary.landed == [f"with {MOST_CROSSING + 1} launched"]
    for work in works[1:]:
        work.end()
    lanes.drain()


def test_lanes_move_along_without_anybody_waiting() -> None:
    diary, lanes = Diary(), ThreadLanes()
    first = diary.hop("first", LANES[1], SlowWork(0.002))
    for hop in (first, diary.hop("second", LANES[0], SlowWork(0.002), first)):
        lanes.submit(hop)
    until(lambda: diary.landed == ["first", "second"])


def test_a_hop_without_a_collective_still_waits_for_its_turn() -> None:
    diary, lanes = Diary(), ThreadLanes()
    slow = HeldWork()
    lanes.submit(diary.hop("slow", LANES[0], slow))
    nothing_to_send = diary.hop("nothing to send", LANES[0])
    lanes.submit(nothing_to_send)
    until(lambda: "nothing to send" in diary.launched)
    assert diary.landed == []
    slow.end()
    lanes.wait(nothing_to_send)
    assert diary.landed == ["slow", "nothing to send"]


def test_random_pauses_change_no_order() -> None:
    orders = []
    for seed in range(5):
        diary, generator = Diary(), random.Random(seed)
        lanes = ThreadLanes(pause=lambda generator=generator: time.sleep(generator.choice([0.0, 0.001])))  # type: ignore[misc]
        for index in range(12):
            lanes.submit(diary.hop(f"{index}", LANES[index % 2], SlowWork(generator.choice([0.0, 0.001]))))
        lanes.drain()
        orders.append([[name for name in diary.launched if int(name) % 2 == lane] for lane in (0, 1)])
    assert all(order == orders[0] for order in orders)


def test_an_error_in_one_hop_is_raised_and_fails_every_later_call_on_hops_that_have_not_landed() -> None:
    diary, lanes = Diary(), ThreadLanes()
    landed = diary.hop("landed", LANES[2])
    unrelated = diary.hop("unrelated", LANES[1], HeldWork())
    bad = HeldWork(ConnectionError("the other rank has gone"))
    failing = diary.hop("failing", LANES[0], bad)
    for hop in (failing, unrelated, landed):
        lanes.submit(hop)
    lanes.wait(landed)
    bad.end()
    with pytest.raises(ConnectionError, match="the other rank has gone"):
        lanes.wait(failing)
    lanes.wait(landed)
    for later in (failing, unrelated):
        with pytest.raises(RuntimeError, match="an earlier collective of this rank failed") as raised:
            lanes.wait(later)
        assert isinstance(raised.value.__cause__, ConnectionError)
    with pytest.raises(RuntimeError, match="an earlier collective"):
        lanes.submit(diary.hop("too late", LANES[3]))
    with pytest.raises(RuntimeError, match="an earlier collective"):
        lanes.drain()
    assert "too late" not in diary.launched


@pytest.mark.parametrize("stage", ["prepare", "launch", "land"])
def test_an_error_while_encoding_or_decoding_counts_like_one_of_the_collective(stage: str) -> None:
    def fail() -> None:
        raise ArithmeticError("no such code")

    lanes = ThreadLanes()
    hop = Hop("bad", LANES[0], lambda: None, lambda: None)
    setattr(hop, stage, fail)
    with pytest.raises(ArithmeticError):
        lanes.submit(hop)
        lanes.wait(hop)
    with pytest.raises(RuntimeError, match="an earlier collective"):
        lanes.wait(hop)
    assert not hop.has_landed


def test_a_long_wait_ends_with_what_the_watch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch() -> None:
        raise RuntimeError("rank 3 failed")

    monkeypatch.setattr("megatron_zpp.comm.lanes.WATCH_SECONDS", 0.01)
    diary, lanes = Diary(), ThreadLanes(watch=watch)
    hop = diary.hop("hop", LANES[0], HeldWork())
    lanes.submit(hop)
    with pytest.raises(RuntimeError, match="rank 3 failed"):
        lanes.wait(hop)
    with pytest.raises(RuntimeError, match="an earlier collective"):
        lanes.submit(diary.hop("too late", LANES[0]))


def test_a_collective_that_fails_on_streams_is_named_by_its_unit_and_lane() -> None:
    def fail() -> None:
        raise RuntimeError("NCCL error: peer exited")

    with pytest.raises(RuntimeError, match=rf"^unit block\.3, lane {LANES[1]}: the collective failed, .*: NCCL error: peer exited$"):
        StreamLanes(Machine()).submit(Hop("block.3", LANES[1], fail, nothing))


def test_the_thread_of_lanes_that_nobody_holds_any_more_ends() -> None:
    lanes = ThreadLanes()
    hop = Hop("hop", LANES[0], lambda: None, lambda: None)
    hop.prepare = hop.launch = hop.land = lambda lanes=lanes: None  # type: ignore[misc]  # the hops of an engine lead back to its lanes
    lanes.submit(hop)
    lanes.wait(hop)
    threads = [thread for thread in threading.enumerate() if thread.name == "lanes"]
    gone = weakref.ref(lanes)
    before = len(threads)
    del lanes, hop
    gc.collect()
    assert gone() is None
    until(lambda: len([thread for thread in threading.enumerate() if thread.name == "lanes"]) < before)
