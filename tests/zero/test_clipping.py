"""The norm clips a step on the host as the formula says, and on the device within fp64 rounding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.zero.optimizer_step import Clipping, skip_flag

scales = st.one_of(st.just(1.0), st.integers(-8, 40).map(lambda power: 2.0**power), st.floats(1e-3, 1e6))
clippings = st.builds(Clipping, scales, st.sampled_from([0.0, 1e-3, 0.3, 1.0, 1e9]))
squares = st.floats(0.0, 1e200)


@given(squares, clippings)
def test_a_gradient_longer_than_clip_grad_gets_that_length_and_others_are_only_unscaled(squared: float, clipping: Clipping) -> None:
    length, scaled = clipping.norm(squared), math.sqrt(squared)
    assert length == scaled / clipping.scale
    clipped = scaled * clipping.factor(squared)
    is_clipped = 0 < clipping.clip_grad < length
    assert clipped == pytest.approx(clipping.clip_grad if is_clipped else length, rel=1e-6, abs=1e-6)  # the epsilon in the divisor


@given(squares, clippings)
def test_the_device_has_the_factor_of_the_host_rounded_to_fp32(squared: float, clipping: Clipping) -> None:
    found = clipping.factor_on_device(torch.tensor(squared, dtype=torch.float64))
    assert found.dtype is torch.float32
    # The fp64 factors differ by a few roundings, so those in fp32 by one at most.
    assert found.item() == pytest.approx(clipping.factor(squared), rel=1.01 * 2**-23, abs=2**-149)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_whose_norm_is_not_finite_is_skipped_on_host_and_device(bad: float) -> None:
    assert not math.isfinite(Clipping(2.0, 1.0).norm(bad))
    assert skip_flag(torch.tensor(bad, dtype=torch.float64)).item() == 1.0
    assert skip_flag(torch.tensor(3.0, dtype=torch.float64)).item() == 0.0
