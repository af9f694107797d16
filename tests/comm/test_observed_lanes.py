from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_zpp.comm.lanes import Hop, ThreadLanes
from megatron_zpp.comm.links import INTER_CLIMB, INTER_DESCEND, INTRA_CLIMB, INTRA_DESCEND
from megatron_zpp.comm.observed_lanes import WAIT_TIMERS, ObservedLanes, range_name
from megatron_zpp.monitor.observer import Observer, StepObserver
from megatron_zpp.monitor.timers import TIMER_LEVELS
from megatron_zpp.parallel.topology import LANES


class Diary:
    """Names in the order in which their blocks begin and end."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.entries.append(name)
        yield
        self.entries.append(f"end of {name}")

    def observer(self) -> StepObserver:
        return StepObserver((), (self.span,))


def hop(name: str, lane: object, after: Hop | None = None) -> Hop:
    return Hop(name, lane, lambda: None, lambda: None, after)  # type: ignore[arg-type]


def test_every_lane_has_a_timer_and_a_rung() -> None:
    assert set(WAIT_TIMERS) == set(LANES) and set(WAIT_TIMERS.values()) <= set(TIMER_LEVELS)
    assert [range_name(hop("u", lane)) for lane in (INTER_CLIMB, INTRA_CLIMB, INTRA_DESCEND, INTER_DESCEND)] == [
        "u inter-climb to secondary",
        "u intra-climb to full",
        "u intra-descend to secondary",
        "u inter-descend to primary",
    ]


def test_all_parts_of_a_hop_are_reported_and_each_link_is_waited_for_apart() -> None:
    diary = Diary()
    lanes = ObservedLanes(ThreadLanes(), diary.observer())
    first = hop("u", INTER_CLIMB)
    second = hop("u", INTRA_CLIMB, after=first)
    lanes.submit(first)
    lanes.submit(second)
    lanes.wait(second)
    assert first.has_landed and second.has_landed
    begun = {entry for entry in diary.entries if not entry.startswith("end of")}
    moves = ("u inter-climb to secondary", "u intra-climb to full")
    assert begun == {f"{move} {part}" for move in moves for part in ("encode", "send", "decode", "wait")} | {
        "params-all-gather-inter",
        "params-all-gather-intra",
    }
    waits = [entry for entry in diary.entries if entry.endswith("wait") or "all-gather" in entry]
    assert waits == [
        "params-all-gather-inter",
        "u inter-climb to secondary wait",
        "end of u inter-climb to secondary wait",
        "end of params-all-gather-inter",
        "params-all-gather-intra",
        "u intra-climb to full wait",
        "end of u intra-climb to full wait",
        "end of params-all-gather-intra",
    ]
    assert len(diary.entries) == 2 * len(begun)


def test_a_hop_that_was_waited_for_is_not_reported_again() -> None:
    diary = Diary()
    lanes = ObservedLanes(ThreadLanes(), diary.observer())
    first = hop("u", INTRA_DESCEND)
    lanes.submit(first)
    lanes.wait(first)
    told = len(diary.entries)
    lanes.wait(first)
    second = hop("u", INTER_DESCEND, after=first)
    lanes.submit(second)
    lanes.wait(second)
    lanes.drain()
    assert [entry for entry in diary.entries[told:] if "intra" in entry] == []


def test_a_unit_ends_where_the_next_begins() -> None:
    diary = Diary()
    observer = diary.observer()
    observer.begin_unit("forward", "a")
    observer.begin_unit("backward", "b")
    observer.end_unit()
    observer.end_unit()
    assert diary.entries == ["forward a", "end of forward a", "backward b", "end of backward b"]


def test_phases_reach_timers_and_ranges_and_hops_and_units_ranges_alone() -> None:
    of_phases, of_ranges = Diary(), Diary()
    observer = StepObserver((of_phases.span,), (of_ranges.span,))
    with observer.phase("optimizer"), observer.hop("h"):
        observer.begin_unit("forward", "u")
        observer.end_unit()
    assert of_phases.entries == ["optimizer", "end of optimizer"]
    assert of_ranges.entries == ["optimizer", "h", "forward u", "end of forward u", "end of h", "end of optimizer"]


def test_nobody_listening_costs_no_object() -> None:
    observer = Observer()
    assert observer.phase("optimizer") is observer.hop("h")
