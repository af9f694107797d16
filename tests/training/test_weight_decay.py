"""Weight decay over a run, against Megatron's formulas evaluated by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.training.weight_decay import WeightDecaySchedule


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.3] * 6),
        ("linear", [0.1, 0.15, 0.2, 0.25, 0.3, 0.3]),
        ("cosine", [0.1, 0.1 + 0.2 * 0.1464466, 0.2, 0.1 + 0.2 * 0.8535534, 0.3, 0.3]),  # (1 +- 1 / sqrt(2)) / 2 at the quarters
    ],
)
def test_weight_decay_is_megatrons_at_the_quarters_of_its_length_and_after(style: str, expected: list[float]) -> None:
    schedule = WeightDecaySchedule(style, 0.3 if style == "constant" else 0.1, 0.3, 400)
    assert [schedule.weight_decay(samples) for samples in range(0, 501, 100)] == pytest.approx(expected, rel=1e-6)


@given(st.sampled_from(["linear", "cosine"]), st.floats(0, 1), st.floats(0, 1), st.integers(1, 1000), st.integers(0, 2000))
def test_weight_decay_stays_between_its_ends(style: str, start: float, end: float, length: int, samples: int) -> None:
    low, high = sorted((start, end))
    assert low - 1e-12 <= WeightDecaySchedule(style, start, end, length).weight_decay(samples) <= high + 1e-12


def test_schedules_of_weight_decay_differ_in_what_shapes_them() -> None:
    constant = WeightDecaySchedule("constant", 0.1, 0.1, 10)
    assert list(constant.differences(WeightDecaySchedule("constant", 0.1, 0.1, 99))) == []
    assert list(constant.differences(WeightDecaySchedule("constant", 0.2, 0.2, 10))) == [("constant", 0.1, 0.2)]
    rising = WeightDecaySchedule("linear", 0.0, 0.1, 10)
    assert list(constant.differences(rising)) == [("style", "constant", "linear"), ("start", 0.1, 0.0)]
    assert list(rising.differences(WeightDecaySchedule("linear", 0.0, 0.1, 20))) == [("incr_samples", 10, 20)]
