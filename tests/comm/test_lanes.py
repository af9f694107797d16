from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.comm.backend import Work
from megatron_zpp.comm.lanes import Hop, PolledLanes
from megatron_zpp.parallel.topology import LANES, Lane


@dataclass
class SlowWork:
    """Ends after a number of polls."""

    polls: int

    def is_completed(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> None:
        return None


@dataclass
class GatedWork:
    """Ends once `gate` has landed."""

    gate: Hop

    def is_completed(self) -> bool:
        return self.gate.has_landed

    def wait(self) -> None:
        return None


@dataclass
class GatedThenFailing(GatedWork):
    """Ends badly once `gate` has landed."""

    def wait(self) -> None:
        raise ConnectionError("the other rank has gone")


@dataclass
class Diary:
    """What happened to hops, in order."""

    launched: list[str] = field(default_factory=list)
    landed: list[str] = field(default_factory=list)

    def hop(self, name: str, lane: Lane, work: Work | None = None, after: Hop | None = None) -> Hop:
        def launch() -> Work | None:
            if after is not None:
                assert after.name in self.landed
            self.launched.append(name)
            return work

        return Hop(name, lane, launch, lambda: self.landed.append(name), after)


plans = st.lists(st.tuples(st.sampled_from(range(len(LANES))), st.integers(0, 4), st.booleans()), min_size=1, max_size=25)


@settings(max_examples=100, deadline=None)
@given(plans, st.data())
def test_every_lane_launches_and_lands_its_hops_in_the_order_of_submission_and_each_after_the_hop_it_needs(
    plan: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    diary, lanes = Diary(), PolledLanes()
    hops: list[Hop] = []
    for index, (lane, polls, is_chained) in enumerate(plan):
        after = data.draw(st.sampled_from(hops)) if hops and is_chained else None
        hops.append(diary.hop(f"{index}", LANES[lane], SlowWork(polls) if polls else None, after))
        lanes.submit(hops[-1])
    waited = data.draw(st.sampled_from(hops))
    lanes.wait(waited)
    assert waited.has_landed
    lanes.drain()
    for lane in LANES:
        submitted = [hop.name for hop in hops if hop.lane == lane]
        assert [name for name in diary.launched if name in submitted] == submitted
        assert [name for name in diary.landed if name in submitted] == submitted


def test_a_lane_has_one_collective_under_way_at_a_time() -> None:
    diary, lanes = Diary(), PolledLanes()
    first = diary.hop("first", LANES[0], SlowWork(50))
    lanes.submit(first)
    lanes.submit(diary.hop("second", LANES[0], SlowWork(0)))
    assert diary.launched == ["first"]
    lanes.wait(first)
    assert diary.landed[0] == "first"


def test_waiting_for_one_hop_moves_all_lanes() -> None:
    diary, lanes = Diary(), PolledLanes()
    other_head = diary.hop("other head", LANES[1], SlowWork(3))
    other = diary.hop("other", LANES[1], SlowWork(3), other_head)
    waited = diary.hop("waited", LANES[0], GatedWork(other))  # cannot end before the other lane has come to its second hop
    for hop in (waited, other_head, other):
        lanes.submit(hop)
    lanes.wait(waited)
    assert diary.landed == ["other head", "other", "waited"]


def test_a_hop_without_a_collective_still_waits_for_its_turn() -> None:
    diary, lanes = Diary(), PolledLanes()
    lanes.submit(diary.hop("slow", LANES[0], SlowWork(10)))
    nothing_to_send = diary.hop("nothing to send", LANES[0])
    lanes.submit(nothing_to_send)
    assert diary.landed == []
    lanes.wait(nothing_to_send)
    assert diary.landed == ["slow", "nothing to send"]


def test_random_pauses_change_no_order() -> None:
    orders = []
    for seed in range(5):
        diary, generator = Diary(), random.Random(seed)
        lanes = PolledLanes(pause=lambda generator=generator: _pause(generator))  # type: ignore[misc]
        for index in range(12):
            lanes.submit(diary.hop(f"{index}", LANES[index % 2], SlowWork(generator.randrange(4))))
        lanes.drain()
        orders.append([[name for name in diary.launched if int(name) % 2 == lane] for lane in (0, 1)])
    assert all(order == orders[0] for order in orders)


def _pause(generator: random.Random) -> None:
    for _ in range(generator.randrange(2000)):
        pass


def test_an_error_in_one_hop_is_raised_and_fails_every_later_call_on_hops_that_have_not_landed() -> None:
    diary, lanes = Diary(), PolledLanes()
    landed = diary.hop("landed", LANES[2])
    unrelated = diary.hop("unrelated", LANES[1], SlowWork(1000))
    failing = diary.hop("failing", LANES[0], GatedThenFailing(landed))
    lanes.submit(failing)
    lanes.submit(unrelated)
    with pytest.raises(ConnectionError, match="the other rank has gone"):
        lanes.submit(landed)
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


@pytest.mark.parametrize("stage", ["launch", "land"])
def test_an_error_while_encoding_or_decoding_counts_like_one_of_the_collective(stage: str) -> None:
    def fail() -> None:
        raise ArithmeticError("no such code")

    lanes = PolledLanes()
    hop = Hop("bad", LANES[0], fail if stage == "launch" else lambda: None, fail if stage == "land" else lambda: None)
    with pytest.raises(ArithmeticError):
        lanes.submit(hop)
        lanes.wait(hop)
    with pytest.raises(RuntimeError, match="an earlier collective"):
        lanes.wait(hop)
    assert not hop.has_landed
