"""The decision about a step is that of plain arithmetic on the host, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.zero.clipping import decide

scales = st.one_of(st.just(1.0), st.integers(-8, 40).map(lambda power: 2.0**power), st.floats(1e-3, 1e6))


@given(st.floats(0.0, 1e300), scales, st.sampled_from([0.0, 1e-3, 0.3, 1.0, 1e9]))
def test_the_factor_is_the_one_that_the_host_would_compute(scaled_norm: float, scale: float, clip_grad: float) -> None:
    decision = decide(torch.tensor(scaled_norm, dtype=torch.float64), scale=scale, clip_grad=clip_grad)
    grad_norm = scaled_norm / scale
    clipped = clip_grad / (grad_norm + 1e-6)
    assert decision.grad_norm.item() == grad_norm
    assert decision.factor.item() == (clipped if 0 < clipped < 1 else 1.0) / scale
    assert decision.skips.item() == (0.0 if math.isfinite(grad_norm) else 1.0)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_step_whose_norm_is_not_finite_is_skipped(norm: float) -> None:
    decision = decide(torch.tensor(norm, dtype=torch.float64), scale=2.0, clip_grad=1.0)
    assert decision.skips.item() == 1.0 and decision.skips.dtype is torch.float32
