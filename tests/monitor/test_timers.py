"""Timers and their lines."""

import pytest

from megatron_zpp.monitor.timers import NEVER_RAN, TIMER_LEVELS, Timers, timer_lines


class CountingClock:
    """A clock on which one second passes with every mark."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        self.now += 1.0
        return self.now

    def seconds(self, start, stop):
        return stop - start


def run(timers, name, inner=()):
    with timers.running(name):
        for other in inner:
            run(timers, other)


def test_time_adds_up_until_it_is_taken():
    timers = Timers(2, CountingClock())
    run(timers, "forward-compute")
    timers.settle()
    run(timers, "forward-compute")
    assert timers.take(["forward-compute", "optimizer"]) == [2.0, NEVER_RAN]
    assert timers.take(["forward-compute"]) == [NEVER_RAN]


def test_a_timer_inside_another_counts_in_both():
    timers = Timers(2, CountingClock())
    run(timers, "forward-backward", ["forward-compute"])
    assert timers.take(["forward-backward", "forward-compute"]) == [3.0, 1.0]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_timers_above_the_level_do_not_look_at_the_clock(level):
    clock = CountingClock()
    timers = Timers(level, clock)
    for name in TIMER_LEVELS:
        run(timers, name)
    ran = [name for name, seconds in zip(TIMER_LEVELS, timers.take(list(TIMER_LEVELS)), strict=True) if seconds != NEVER_RAN]
    assert ran == [name for name, needed in TIMER_LEVELS.items() if needed <= level]
    assert clock.now == 2.0 * len(ran)


def test_what_an_evaluation_waits_for_is_not_counted_as_part_of_a_step():
    timers = Timers(2, CountingClock())
    run(timers, "eval-time", ["params-all-gather-inter"])
    run(timers, "params-all-gather-inter")
    assert timers.take(["eval-time", "params-all-gather-inter"]) == [1.0, 1.0]


def test_time_counts_also_where_the_block_fails():
    timers = Timers(1, CountingClock())
    with pytest.raises(KeyError), timers.running("optimizer"):
        raise KeyError
    assert timers.take(["optimizer"]) == [1.0]


TIMES = {"forward-backward": [100.0, 120.256], "optimizer": [8.0, 7.0]}


@pytest.mark.parametrize(
    "option, block",
    [
        (
            "minmax",
            "(min, max) time across ranks (ms):\n"
            "    forward-backward ...............................: (100.00, 120.26)\n"
            "    optimizer ......................................: (7.00, 8.00)",
        ),
        (
            "max",
            "max time across ranks (ms):\n"
            "    forward-backward ...............................: 120.26\n"
            "    optimizer ......................................: 8.00",
        ),
        (
            "all",
            "times across ranks (ms):\n"
            "  forward-backward:\n     rank  0: 100.00\n     rank  1: 120.26\n"
            "  optimizer:\n     rank  0: 8.00\n     rank  1: 7.00",
        ),
    ],
)
def test_lines_are_megatrons(option, block):
    assert timer_lines(option, TIMES) == block


def test_without_a_timer_there_is_no_line():
    assert timer_lines("minmax", {}) == ""
