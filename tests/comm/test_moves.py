"""Which move of the lanes comes first, by a table of situations and by a thread that follows the rule."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.comm.moves import NEVER, Move, NextMove, Times, first_move
from megatron_zpp.parallel.topology import MOST_CROSSING


@dataclass(eq=False)
class AHop(Times):
    name: str
    after: AHop | None = None


def _hop(name: str, state: str, after: AHop | None = None) -> AHop:
    """state: the last of s(ubmitted), p(repared), l(aunched), c(rossed) that has happened."""
    hop = AHop(name, after)
    times = {"s": 0, "p": 1, "l": 2, "c": 3}[state]
    hop.prepared, hop.launched, hop.crossed = (0.0 if times >= count else NEVER for count in (1, 2, 3))
    return hop


def _lane(states: str) -> deque[AHop]:
    return deque(_hop(f"{states}{index}", state) for index, state in enumerate(states))


def _found(*lanes: str) -> tuple[Move, str] | None:
    found = first_move([_lane(states) for states in lanes], 0.0)
    return found and (found.move, found.hop.name)


@pytest.mark.parametrize(
    "lanes, move",
    [
        ([""], None),
        (["s"], (Move.PREPARE, "s0")),
        (["p"], (Move.LAUNCH, "p0")),
        (["l"], None),
        (["c"], (Move.LAND, "c0")),
        (["lp"], (Move.LAUNCH, "lp1")),  # a second one beside the first
        (["llp"], None),  # but not a third
        (["lls"], (Move.PREPARE, "lls2")),  # which is prepared meanwhile
        (["llps"], None),  # and no more than it
        (["clp"], (Move.LAUNCH, "clp2")),  # a place is free once one is across, before it has landed
        (["lcp"], (Move.LAUNCH, "lcp2")),
        (["lc"], None),  # first in, first out: the second waits for the first to land
        (["sp"], (Move.PREPARE, "sp0")),  # nor is it launched before it
        (["s", "c", "p"], (Move.LAUNCH, "p0")),  # among lanes: launch, land, prepare
        (["s", "c"], (Move.LAND, "c0")),
        (["p", "pp"], (Move.LAUNCH, "p0")),  # of like moves that of the first lane
    ],
)
def test_the_first_move_is_the_one_of_the_table(lanes: list[str], move: tuple[Move, str] | None) -> None:
    assert _found(*lanes) == move


def test_a_hop_is_prepared_once_the_hop_that_it_comes_after_has_landed() -> None:
    before = _hop("before", "l")
    lanes = [deque([before]), deque([_hop("then", "s", before)])]
    assert first_move(lanes, 0.0) is None
    before.crossed = before.landed = 7.0
    lanes[0].popleft()
    assert first_move(lanes, 2.0) == NextMove(7.0, Move.PREPARE, lanes[1][0])
    assert first_move(lanes, 9.0) == NextMove(9.0, Move.PREPARE, lanes[1][0])


def test_of_moves_at_different_times_the_earliest_comes_first_whatever_its_kind() -> None:
    late, early = _hop("late", "p"), _hop("early", "s")
    late.prepared, early.submitted = 5.0, 4.0
    lanes = [deque([late]), deque([early])]
    found = first_move(lanes, 0.0)
    assert found is not None and (found.start, found.hop.name) == (4.0, "early")
    found = first_move(lanes, 6.0)  # both can start by then
    assert found is not None and (found.start, found.hop.name) == (6.0, "late")


def _possible_moves(lane: list[AHop]) -> list[tuple[float, Move, str]]:
    """Every move of a lane whose time is known, by the three rules of comm/lanes.py, one hop after the other."""
    found = []
    for index, hop in enumerate(lane[: MOST_CROSSING + 1]):
        before = lane[:index]
        if index == 0:
            found.append((hop.crossed, Move.LAND, hop.name))
        if hop.launched == NEVER and all(other.launched < NEVER for other in before):
            place_free = sorted([0.0] * MOST_CROSSING + [other.crossed for other in before])[-MOST_CROSSING]
            found.append((max(hop.prepared, place_free), Move.LAUNCH, hop.name))
        if hop.prepared == NEVER and all(other.prepared < NEVER for other in before):
            found.append((max(hop.submitted, hop.after.landed) if hop.after else hop.submitted, Move.PREPARE, hop.name))
    return [move for move in found if move[0] < NEVER]


times = st.sampled_from([0.0, 1.0, 2.0, 3.0])


@given(st.lists(st.lists(st.tuples(st.sampled_from("splc"), times, times), max_size=5), max_size=4), times)
def test_the_first_move_is_the_earliest_of_all_possible_ones_then_the_first_by_kind_then_by_lane(
    states: list[list[tuple[str, float, float]]], free_from: float
) -> None:
    lanes = []
    for number, of_lane in enumerate(states):
        lane = []
        for index, (state, at, later) in enumerate(sorted(of_lane, key=lambda hop: "clps".index(hop[0]))):
            hop = _hop(f"{number}.{index}", state, lanes[-1][0] if lanes and lanes[-1] and state == "s" and at > 1 else None)
            hop.submitted = at
            hop.prepared, hop.launched, hop.crossed = (NEVER if time == NEVER else at for time in (hop.prepared, hop.launched, hop.crossed))
            if state == "l" and later > 1:
                hop.crossed = at + later  # the time model knows when a hop will have crossed
            lane.append(hop)
        lanes.append(lane)
    possible = [
        (max(ready, free_from), move, number, name) for number, lane in enumerate(lanes) for ready, move, name in _possible_moves(lane)
    ]
    found = first_move([deque(lane) for lane in lanes], free_from)
    start, move, _, name = min(possible, default=(0.0, None, 0, ""))
    assert (found is None) == (move is None)
    assert found is None or (found.start, found.move, found.hop.name) == (start, move, name)


@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=4), st.data())
def test_a_thread_that_follows_the_rule_lands_every_hop_in_order_with_no_more_under_way_than_allowed(
    chains: list[list[bool]], data: st.DataObject
) -> None:
    lanes: list[deque[AHop]] = []
    last: AHop | None = None
    for index, chain in enumerate(chains):
        lane: deque[AHop] = deque()
        for place, is_chained in enumerate(chain):
            lane.append(AHop(f"{index}.{place}", last if is_chained else None))
        last = lane[-1] if lane else last
        lanes.append(lane)
    expected = [[hop.name for hop in lane] for lane in lanes]
    landed: list[list[str]] = [[] for _ in lanes]
    crossing: list[AHop] = []
    now = 0.0
    while any(lanes):
        now += 1.0
        found = first_move(lanes, now)
        if found is None:
            assert crossing, "nothing can be done and nothing is on its way"
            crossing.pop(data.draw(st.integers(0, len(crossing) - 1))).crossed = now
            continue
        assert found.start == now  # what has happened is past: nothing waits for a time to come
        index = next(index for index, lane in enumerate(lanes) if found.hop in lane)
        if found.move is Move.PREPARE:
            assert found.hop.after is None or found.hop.after.has_landed
            found.hop.prepared = now
        elif found.move is Move.LAUNCH:
            found.hop.launched = now
            crossing.append(found.hop)
            assert sum(hop in crossing for hop in lanes[index]) <= MOST_CROSSING
        else:
            found.hop.landed = now
            landed[index].append(lanes[index].popleft().name)
    assert landed == expected
