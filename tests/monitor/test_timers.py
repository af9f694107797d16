"""Named stopwatches on a clock that the test sets."""

import pytest

from megatron_zpp.monitor.timers import Timers


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def test_timer_adds_up_what_lies_between_start_and_stop(clock):
    timer = Timers(now=clock)("step")
    for seconds in (1.0, 2.5):
        timer.start()
        clock.seconds += seconds
        timer.stop()
        clock.seconds += 10.0
    assert timer.elapsed_seconds() == 3.5
    assert timer.elapsed_seconds() == 0.0


def test_reading_without_reset_keeps_the_sum(clock):
    timers = Timers(now=clock)
    with timers.measure("step"):
        clock.seconds += 2.0
    assert timers("step").elapsed_seconds(reset=False) == 2.0
    assert timers("step").elapsed_seconds() == 2.0


def test_running_timer_can_be_read_and_runs_on(clock):
    timer = Timers(now=clock)("interval-time")
    timer.start()
    clock.seconds += 1.0
    assert timer.elapsed_seconds() == 1.0
    clock.seconds += 2.0
    timer.stop()
    assert timer.elapsed_seconds() == 2.0


def test_names_keep_timers_apart(clock):
    timers = Timers(now=clock)
    with timers.measure("outer"):
        clock.seconds += 1.0
        with timers.measure("inner"):
            clock.seconds += 2.0
    assert (timers("outer").elapsed_seconds(), timers("inner").elapsed_seconds()) == (3.0, 2.0)


def test_device_is_waited_for_before_each_reading_of_the_clock(clock):
    def synchronize():
        clock.seconds += 0.5

    timers = Timers(synchronize, clock)
    with timers.measure("step"):
        pass
    assert timers("step").elapsed_seconds() == 0.5
    assert clock.seconds == 101.0


def test_measured_block_that_raises_stops_its_timer(clock):
    timers = Timers(now=clock)
    with pytest.raises(KeyError), timers.measure("step"):
        raise KeyError
    timers("step").start()


def test_unpaired_start_or_stop_names_the_timer(clock):
    timer = Timers(now=clock)("optimizer")
    with pytest.raises(RuntimeError, match="timer optimizer was stopped without a start"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="timer optimizer was started twice without a stop"):
        timer.start()
