"""Rows of iterations without a usable loss or gradient."""

from __future__ import annotations

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.training.bad_iterations import BadIterations
from megatron_zpp.training.step import StepOutcome

GOOD, SKIPPED = StepOutcome(1.0, 1.0, False, 0), StepOutcome(1.0, float("inf"), True, 0)
NAN_LOSS = StepOutcome(float("nan"), 1.0, False, 0)


def test_a_good_iteration_ends_a_row_of_bad_ones() -> None:
    bad = BadIterations()
    for outcome, expected in [(SKIPPED, 1), (SKIPPED, 2), (GOOD, 0), (NAN_LOSS, 1), (SKIPPED, 2)]:
        bad.count(outcome, Progress(), {})
        assert bad.consecutive == expected


def test_the_state_before_the_first_of_a_row_is_known_as_long_as_no_bad_one_moved_the_weights() -> None:
    bad, progress = BadIterations(), Progress(4, 40, 40)
    bad.count(SKIPPED, progress, {"scale": 8.0})
    progress.advance(10, 16, is_skipped=True)
    bad.count(SKIPPED, progress, {"scale": 4.0})
    assert bad.progress_before == Progress(4, 40, 40) and bad.weights_are_from_before and bad.scaler_before == {"scale": 8.0}
    bad.count(NAN_LOSS, progress, {"scale": 2.0})
    assert not bad.weights_are_from_before
