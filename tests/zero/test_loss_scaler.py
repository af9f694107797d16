from __future__ import annotations

import math

import pytest
import torch
from harness.small_engine import ROWS, Job, Rank, mean_losses, train_world
from harness.worlds import run_world
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.zero.loss_scaler import ConstantLossScaler, DynamicLossScaler

pytestmark = pytest.mark.virtual

outcomes = st.lists(st.booleans(), max_size=60)


def _scale_after(overflows: list[bool], start: float, least: float, window: int, hysteresis: int) -> float:
    """Megatron's rule, told from the whole history: each overflow counts against the patience since the last growth."""
    scale, bad_since_growth, good_in_a_row = start, 0, 0
    for is_overflow in overflows:
        bad_since_growth += is_overflow
        good_in_a_row = 0 if is_overflow else good_in_a_row + 1
        if is_overflow and bad_since_growth >= hysteresis:
            scale = max(scale / 2, least)
        if good_in_a_row == window:
            scale, bad_since_growth, good_in_a_row = scale * 2, 0, 0
    return scale


@given(outcomes, st.integers(1, 5), st.integers(1, 4), st.sampled_from([1.0, 4.0, 64.0]))
def test_the_dynamic_scale_follows_window_hysteresis_and_minimum(overflows: list[bool], window: int, hysteresis: int, least: float) -> None:
    scaler = DynamicLossScaler(scale=64.0, min_scale=least, window=window, hysteresis=hysteresis)
    for index, is_overflow in enumerate(overflows):
        scaler.update(is_overflow=is_overflow)
        assert scaler.scale == _scale_after(overflows[: index + 1], 64.0, least, window, hysteresis)


def test_the_first_overflow_is_forgiven_with_a_hysteresis_of_two_and_later_ones_are_not_before_the_scale_has_grown() -> None:
    scaler = DynamicLossScaler(scale=16.0, window=2, hysteresis=2)
    scales = []
    for is_overflow in (True, True, True, False, False, True, True):
        scaler.update(is_overflow=is_overflow)
        scales.append(scaler.scale)
    assert scales == [16.0, 8.0, 4.0, 4.0, 8.0, 8.0, 4.0]


@given(outcomes, outcomes)
def test_a_scaler_loaded_from_a_state_goes_on_as_the_one_it_came_from(before: list[bool], after: list[bool]) -> None:
    saved = DynamicLossScaler(scale=64.0, window=3, hysteresis=2)
    for is_overflow in before:
        saved.update(is_overflow=is_overflow)
    loaded = DynamicLossScaler(window=3, hysteresis=2)
    loaded.load_state(saved.state())
    for is_overflow in after:
        saved.update(is_overflow=is_overflow)
        loaded.update(is_overflow=is_overflow)
        assert loaded.scale == saved.scale


def test_a_constant_scale_stays() -> None:
    scaler = ConstantLossScaler(128.0)
    scaler.update(is_overflow=True)
    scaler.load_state({"scale": 2.0})
    assert scaler.scale == 128.0


@pytest.mark.parametrize("row", list(ROWS))
def test_an_fp16_run_skips_until_its_scale_fits_on_every_rank_alike_and_then_learns_like_fp32(row: str) -> None:
    job = Job(ROWS[row], torch.float16, steps=12, loss_scaler=lambda: DynamicLossScaler(scale=2.0**22, hysteresis=2))

    def program(backend: VirtualBackend) -> list[tuple[bool, float, float, float]]:
        rank = Rank(job, backend)
        steps = []
        for step in range(job.steps):
            scale = rank.engine.loss_scaler.scale
            loss, result = rank.step(step)
            steps.append((result.is_skipped, scale, result.grad_norm, loss))
        rank.engine.close()
        return steps

    histories = run_world((2, 2), program)
    assert all([step[:3] for step in history] == [step[:3] for step in histories[0]] for history in histories) or _nan_norms(histories)
    skipped = [is_skipped for is_skipped, *_ in histories[0]]
    first_good = skipped.index(False)
    assert 2 <= first_good <= 8 and not any(skipped[first_good:])
    assert [scale for _, scale, *_ in histories[0]][: first_good + 1] == [2.0**22] * 2 + [2.0 ** (22 - n) for n in range(1, first_good)]
    assert all(not math.isfinite(norm) for is_skipped, _, norm, _ in histories[0] if is_skipped)
    losses = mean_losses([[(step[3], 0.0) for step in history] for history in histories])
    unskipped = _fp32_losses_of_steps(row, first_good, job.steps)
    assert losses[first_good:] == pytest.approx(unskipped, rel=2e-2)  # fp16 has 11 bits, and a few updates of rounded gradients


def _nan_norms(histories: list[list[tuple[bool, float, float, float]]]) -> bool:
    return all([step[:2] for step in history] == [step[:2] for step in histories[0]] for history in histories)


def _fp32_losses_of_steps(row: str, first: int, stop: int) -> list[float]:
    def program(backend: VirtualBackend) -> list[tuple[float, float]]:
        rank = Rank(Job(ROWS[row]), backend)
        history = [(rank.step(step)[0], 0.0) for step in range(first, stop)]
        rank.engine.close()
        return history

    return mean_losses(run_world((2, 2), program))


def test_a_power_of_two_as_constant_scale_changes_no_bit_in_fp32() -> None:
    scaled = Job(steps=3, loss_scaler=lambda: ConstantLossScaler(1024.0), clip_grad=0.0)
    assert train_world((2, 2), scaled) == train_world((2, 2), Job(steps=3, clip_grad=0.0))
