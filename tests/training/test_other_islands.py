"""What islands of a run tell each other: when, and what a report has of all of them."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from harness.islands import Member, run_islands

from megatron_zpp.comm.waits import WATCH_SECONDS, Waits
from megatron_zpp.monitor.memory import MemoryReading
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.training.metrics import Interval, ReportInputs, StepReadings
from megatron_zpp.training.other_islands import OtherIslands, of_all_islands
from megatron_zpp.training.step import StepOutcome
from megatron_zpp.training.stop_conditions import StopRequest

pytestmark = pytest.mark.virtual
PERIOD = 4
MEMORY = MemoryReading(0, 0)


def inputs_of(loss: float, norm: float, loss_scale: float, zeros: int | None, params_norm: float | None) -> ReportInputs:
    outcome = StepOutcome(loss, norm, is_skipped=False, model_state_bytes=1, num_zeros=zeros)
    return ReportInputs(StepReadings(outcome, 8, 1e-3, loss_scale), 128, MEMORY, params_norm=params_norm)


def test_a_run_without_islands_sees_its_own_numbers_and_requests_at_once() -> None:
    alone, interval, inputs = OtherIslands(None), Interval([1.0]), inputs_of(1.0, 2.0, 3.0, 4, 5.0)
    assert of_all_islands(interval, inputs, None) == (interval, inputs)
    assert alone.requests(StopRequest.SIGNAL, 1) is StopRequest.SIGNAL


def test_a_request_of_one_island_is_known_to_all_when_the_period_ends() -> None:
    def program(member: Member) -> list[StopRequest]:
        others, found = OtherIslands(member.outer), []
        for iteration in range(1, 2 * PERIOD + 1):
            own = StopRequest.NONE
            if (member.outer.island, iteration) == (1, 1):
                own = StopRequest.SIGNAL
            if (member.outer.island, iteration) == (0, PERIOD):
                own = StopRequest.DURATION
            found.append(others.requests(own, iteration))
        return found

    known = StopRequest.SIGNAL | StopRequest.DURATION
    expected = [known if iteration % PERIOD == 0 else StopRequest.NONE for iteration in range(1, 2 * PERIOD + 1)]
    assert run_islands(2, 2, program, options=OuterOptions(period=PERIOD)) == [expected] * 4


def test_while_islands_take_means_a_request_is_known_at_once() -> None:
    def program(member: Member) -> list[StopRequest]:
        others = OtherIslands(member.outer)
        own = StopRequest.SIGNAL if member.outer.island else StopRequest.NONE
        return [others.requests(StopRequest.NONE, 1), others.requests(own, 2)]

    options = OuterOptions(period=PERIOD, start_iteration=2)
    assert run_islands(2, 1, program, options=options) == [[StopRequest.NONE, StopRequest.SIGNAL]] * 2


def test_an_island_learns_of_a_failure_on_another_long_before_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then: each look asks the store of the run."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def program(member: Member) -> list[int]:
        looks, found = [], []
        member.outer.links.waits = Waits(lambda: looks.append(1))
        others = OtherIslands(member.outer)
        for iteration, seconds in enumerate((0.0, 0.5 * WATCH_SECONDS, 0.6 * WATCH_SECONDS, 0.6 * WATCH_SECONDS), 1):
            now[0] += seconds
            others.requests(StopRequest.NONE, iteration)
            found.append(len(looks))
        return found

    assert run_islands(1, 1, program, options=OuterOptions(period=100)) == [[1, 1, 2, 2]]


@pytest.mark.parametrize("counts", [True, False])
def test_a_report_is_the_same_on_all_islands_and_has_the_numbers_of_each(counts: bool) -> None:
    """Means of losses, root mean squares of norms, the smallest loss scale, and the iterations of the worst island."""

    def program(member: Member) -> tuple[Interval, ReportInputs]:
        if member.outer.island == 0:
            own = Interval([1.0, 2.0, 3.0], samples=24, seconds=1.0, iterations=3)
            inputs = inputs_of(3.0, 3.0, 8.0, 10 if counts else None, 1.0 if counts else None)
        else:
            own = Interval([6.0], samples=24, seconds=1.0, iterations=3, skipped_iterations=2, nan_iterations=1)
            inputs = inputs_of(5.0, 4.0, 2.0, 13 if counts else None, 7.0 if counts else None)
        return of_all_islands(own, inputs, member.outer)

    found = run_islands(2, 2, program)
    expected = Interval([3.0], samples=24, seconds=1.0, iterations=3, skipped_iterations=2, nan_iterations=1)
    latest = inputs_of(4.0, math.sqrt(12.5), 2.0, 12 if counts else None, 5.0 if counts else None)
    assert found == [(expected, latest)] * 4


def test_an_interval_without_a_usable_step_has_the_mean_of_the_latest_losses() -> None:
    def program(member: Member) -> float:
        inputs = inputs_of(math.inf if member.outer.island else 1.0, 1.0, 1.0, None, None)
        interval, reported = of_all_islands(Interval(iterations=1), replace(inputs), member.outer)
        return interval.mean_loss(reported.latest.outcome)

    assert run_islands(2, 1, program) == [math.inf] * 2
