"""Which units are exchanged in which step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.system.user_error import UserError

pytestmark = pytest.mark.pure

NUMELS = st.lists(st.integers(1, 10**9), min_size=1, max_size=12)
PERIODS = st.integers(1, 40)


@given(NUMELS, PERIODS, st.integers(0, 100), st.booleans())
def test_every_unit_is_due_once_in_any_period_and_first_within_one(numels: list[int], period: int, start: int, is_staggered: bool) -> None:
    options = OuterOptions(period, is_staggered=is_staggered)
    for first in (1, start + 1):
        times = [sum(due) for due in zip(*(options.is_due(numels, step) for step in range(first, first + period)), strict=True)]
        assert times == [1] * len(numels)


@given(NUMELS, PERIODS)
def test_units_that_take_turns_never_move_more_in_one_step_than_a_share_of_the_model_and_a_unit(numels: list[int], period: int) -> None:
    options = OuterOptions(period)
    for step in range(1, period + 1):
        moved = sum(numel for numel, is_due in zip(numels, options.is_due(numels, step), strict=True) if is_due)
        assert moved <= sum(numels) / period + max(numels)


def test_units_that_do_not_take_turns_are_all_due_at_multiples_of_the_period() -> None:
    options = OuterOptions(3, is_staggered=False)
    assert [step for step in range(10) if all(options.is_due([5, 1], step))] == [3, 6, 9]
    assert not any(any(options.is_due([5, 1], step)) for step in (1, 2, 4, 5, 7, 8))


def test_equal_units_take_turns_at_equal_distances() -> None:
    turns = [[step for step in range(1, 9) if OuterOptions(4).is_due([7, 7], step)[unit]] for unit in range(2)]
    assert turns == [[4, 8], [2, 6]]


@pytest.mark.parametrize("start_iteration", [0, 3])
def test_no_unit_is_due_before_the_first_step(start_iteration: int) -> None:
    assert OuterOptions(4, start_iteration=start_iteration).is_due([7, 7], 0) == [False, False]


def test_until_outer_steps_begin_all_units_are_due_after_every_step() -> None:
    options = OuterOptions(4, start_iteration=3)
    assert [options.is_due([7, 7], step) for step in range(1, 7)] == [[True] * 2] * 3 + [[True, False], [False, False], [False, True]]
    assert [options.takes_means(step) for step in range(1, 6)] == [True, True, True, False, False]


@pytest.mark.parametrize(("period", "rate"), [(8, 0.2), (16, 0.4), (28, 0.7), (100, 0.7)])
def test_the_learning_rate_grows_with_the_period_unless_it_is_given(period: int, rate: float) -> None:
    assert OuterOptions(period).outer_rate == pytest.approx(rate)
    assert OuterOptions(period, learning_rate=0.3).outer_rate == 0.3


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        ({"period": 0}, "period of outer steps is 0; choose a number of inner steps, 1 or more"),
        ({"period": 2.0}, "period of outer steps is 2.0"),
        ({"period": True}, "period of outer steps is True"),
        ({"learning_rate": 0.0}, "learning_rate of outer steps is 0.0; choose a positive number"),
        ({"learning_rate": float("nan")}, "learning_rate of outer steps is nan"),
        ({"learning_rate": float("inf")}, "learning_rate of outer steps is inf"),
        ({"momentum": 1.0}, "momentum of outer steps is 1.0; choose 0 or more, and less than 1"),
        ({"learning_rate": "0.4"}, "learning_rate of outer steps is '0.4'; choose a positive number, or leave it out"),
        ({"momentum": "0.9"}, "momentum of outer steps is '0.9'"),
        ({"gradient_code": 3}, "gradient_code of outer steps is 3; choose a megatron_zpp.Code"),
        ({"difference_code": None}, "difference_code of outer steps is None"),
        ({"is_staggered": 1}, "is_staggered of outer steps is 1; choose True or False"),
        ({"overlap_steps": 2}, "overlap_steps of outer steps are 2; choose 0 or 1"),
        ({"overlap_steps": True}, "overlap_steps of outer steps are True"),
        ({"start_iteration": -1}, "start_iteration of outer steps is -1; choose a number of inner steps, 0 or more"),
        ({"start_iteration": 1.5}, "start_iteration of outer steps is 1.5"),
        ({"momentum": float("nan")}, "momentum of outer steps is nan"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: dict[str, object], finding: str) -> None:
    with pytest.raises(UserError, match=finding):
        OuterOptions(**arguments)  # type: ignore[arg-type]
