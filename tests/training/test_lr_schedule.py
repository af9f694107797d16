"""The learning rate, against values computed with Megatron-LM (commit d98e8a64)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.lr_schedule import LearningRateSchedule

# init 0, max 3e-4, min 3e-5, warmup 100, decay 1000, at 0, 100, ..., 1100.
GOLDEN = {
    "constant": ["0.000000e+00", *["3.000000e-04"] * 11],
    "linear": (
        "0.000000e+00 3.000000e-04 2.700000e-04 2.400000e-04 2.100000e-04 1.800000e-04 "
        "1.500000e-04 1.200000e-04 9.000000e-05 6.000000e-05 3.000000e-05 3.000000e-05"
    ).split(),
    "cosine": (
        "0.000000e+00 3.000000e-04 2.918585e-04 2.684160e-04 2.325000e-04 1.884425e-04 "
        "1.415575e-04 9.750000e-05 6.158400e-05 3.814150e-05 3.000000e-05 3.000000e-05"
    ).split(),
}
# WSD with an annealing of 200; its linear and cosine rates are Megatron-LM's, the others by hand from its formulas.
WSD_UP_TO_800 = ["0.000000e+00", *["3.000000e-04"] * 8]
GOLDEN_ANNEALING = {
    "linear": [*WSD_UP_TO_800, "1.650000e-04", "3.000000e-05", "3.000000e-05"],
    "cosine": [*WSD_UP_TO_800, "1.650000e-04", "3.000000e-05", "3.000000e-05"],
    "exponential": [*WSD_UP_TO_800, "1.418377e-04", "3.000000e-05", "3.000000e-05"],  # 2 / sqrt(2) - 1 = 0.414214 is left at the half
    "minus_sqrt": [*WSD_UP_TO_800, "1.090812e-04", "3.000000e-05", "3.000000e-05"],  # 1 - 1 / sqrt(2) = 0.292893
}
INVERSE_SQUARE_ROOT = (
    "0.000000e+00 3.000000e-04 2.121320e-04 1.732051e-04 1.500000e-04 1.341641e-04 "
    "1.224745e-04 1.133893e-04 1.060660e-04 1.000000e-04 9.486833e-05 3.000000e-05"
).split()
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
STYLES = st.sampled_from([*sorted(GOLDEN), "WSD"])
ANNEALINGS = st.sampled_from(sorted(GOLDEN_ANNEALING))


def schedule_of(flags, world_size=1):
    config = resolve(parse_flags((SHAPE + flags).split()), world_size, world_size)
    return LearningRateSchedule.from_config(config.optimizer, config.training, config.model.seq_length)


@pytest.mark.parametrize("style", GOLDEN)
def test_rates_equal_megatrons(style):
    schedule = LearningRateSchedule(style, 3e-4, 3e-5, 0.0, 100, 1000)
    assert [f"{schedule.learning_rate(num_samples):.6e}" for num_samples in range(0, 1101, 100)] == GOLDEN[style]


@pytest.mark.parametrize("style", GOLDEN_ANNEALING)
@pytest.mark.parametrize("spelling", ["WSD", "wsd"])
@pytest.mark.parametrize("unit", ["iters", "samples"])
def test_the_rates_of_wsd_are_megatrons_in_either_spelling_and_unit(style, spelling, unit):
    times = 1 if unit == "iters" else 8
    flags = f"--lr 3e-4 --min-lr 3e-5 --lr-decay-style {spelling} --lr-wsd-decay-style {style} --lr-wsd-decay-{unit} {200 * times} "
    schedule = schedule_of(flags + f"--train-{unit} {1000 * times} --lr-warmup-{unit} {100 * times} --micro-batch-size 4", world_size=2)
    assert [f"{schedule.learning_rate(8 * step):.6e}" for step in range(0, 1101, 100)] == GOLDEN_ANNEALING[style]


def test_the_inverse_square_root_falls_from_the_end_of_the_warmup_to_the_lowest_rate():
    schedule = LearningRateSchedule("inverse-square-root", 3e-4, 3e-5, 0.0, 100, 1000)
    assert [f"{schedule.learning_rate(step):.6e}" for step in range(0, 1101, 100)] == INVERSE_SQUARE_ROOT
    assert LearningRateSchedule("inverse-square-root", 1.0, 0.25, 0.0, 1, 1000).learning_rate(100) == 0.25
    assert LearningRateSchedule("inverse-square-root", 1.0, 0.0, 0.0, 0, 1000).learning_rate(0) == 1.0


@pytest.mark.parametrize("style", GOLDEN)
def test_schedule_in_iterations_is_the_one_in_samples_times_the_global_batch(style):
    flags = f"--lr 3e-4 --min-lr 3e-5 --lr-decay-style {style} --micro-batch-size 4 "
    schedule = schedule_of(flags + "--train-iters 1000 --lr-warmup-iters 100", world_size=2)
    rates = [f"{schedule.learning_rate(8 * iteration):.6e}" for iteration in range(0, 1101, 100)]
    assert rates == GOLDEN[style]
    assert schedule == schedule_of(flags + "--train-samples 8000 --lr-warmup-samples 800", world_size=2)


def test_warmup_fraction_is_of_the_decay_horizon():
    flags = "--lr 1 --train-iters 50 --lr-decay-iters 200 --micro-batch-size 3 "
    assert schedule_of(flags + "--lr-warmup-fraction 0.25") == schedule_of(flags + "--lr-warmup-iters 50")


def test_decay_ends_with_training_unless_told_otherwise():
    assert schedule_of("--lr 1 --train-iters 50 --micro-batch-size 3").decay_samples == 150
    assert schedule_of("--lr 1 --train-iters 50 --lr-decay-iters 70 --micro-batch-size 3").decay_samples == 210


@given(
    style=STYLES,
    rates=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    warmup=st.integers(0, 500),
    decay=st.integers(501, 2000),
    num_samples=st.integers(0, 3000),
    annealing=st.tuples(ANNEALINGS, st.integers(1, 501)),
)
def test_rate_stays_between_the_ends(style, rates, warmup, decay, num_samples, annealing):
    low, init, peak = sorted(rates)
    rate = LearningRateSchedule(style, peak, low, init, warmup, decay, *annealing).learning_rate(num_samples)
    assert low - 1e-12 <= rate <= peak + 1e-12


@given(style=STYLES, warmup=st.integers(0, 100), decay=st.integers(200, 400), num_samples=st.integers(0, 500), annealing=ANNEALINGS)
def test_rate_rises_in_the_warmup_and_never_after(style, warmup, decay, num_samples, annealing):
    schedule = LearningRateSchedule(style, 1.0, 0.1, 0.05, warmup, decay, annealing, 100)
    now, later = schedule.learning_rate(num_samples), schedule.learning_rate(num_samples + 1)
    assert later > now if num_samples < warmup else later <= now + 2**-52  # the warmup's last rate is rounded once


@given(st.integers(1, 100))
def test_warmup_starts_at_its_initial_rate_and_ends_at_the_peak(warmup):
    schedule = LearningRateSchedule("cosine", 1.0, 0.0, 0.25, warmup, 1000)
    assert (schedule.learning_rate(0), schedule.learning_rate(warmup)) == (0.25, 1.0)


def test_half_of_a_cosine_is_half_of_the_way():
    assert math.isclose(LearningRateSchedule("cosine", 1.0, 0.2, 0.0, 0, 1000).learning_rate(500), 0.6)


def test_unknown_style_names_the_choices():
    with pytest.raises(UserError, match="--lr-decay-style step is not available; choose .*inverse-square-root or WSD"):
        LearningRateSchedule("step", 1.0, 0.0, 0.0, 0, 10)


def test_schedules_differ_in_what_shapes_their_curves() -> None:
    one = LearningRateSchedule("linear", 1e-2, 0.0, 0.0, 0, 100)
    assert list(one.differences(one)) == []
    other = LearningRateSchedule("linear", 2e-2, 0.0, 0.0, 10, 100)
    assert list(one.differences(other)) == [("max_lr", 1e-2, 2e-2), ("warmup_samples", 0, 10)]
    assert list(one.differences(LearningRateSchedule("linear", 1e-2, 0.0, 1e-3, 0, 100))) == []


def test_constant_rates_have_no_end_of_decay_to_differ_in() -> None:
    one = LearningRateSchedule("constant", 1e-2, 0.0, 0.0, 0, 100)
    assert list(one.differences(LearningRateSchedule("constant", 1e-2, 1e-3, 0.0, 0, 900))) == []
    assert list(one.differences(LearningRateSchedule("linear", 1e-2, 0.0, 0.0, 0, 900))) == [
        ("style", "constant", "linear"),
        ("decay_samples", 100, 900),
    ]


def test_schedules_differ_in_their_annealing_only_where_there_is_one() -> None:
    one, other = (LearningRateSchedule("WSD", 1e-2, 0.0, 0.0, 0, 100, style, 10) for style in ("linear", "cosine"))
    assert list(one.differences(other)) == [("annealing_style", "linear", "cosine")]
    one, other = (LearningRateSchedule("cosine", 1e-2, 0.0, 0.0, 0, 100, style, 10) for style in ("linear", "cosine"))
    assert list(one.differences(other)) == []
