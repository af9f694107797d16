from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness.small_gpt import small_config
from torch import Tensor

from megatron_zpp.model.norm import make_norm, rms_norm

# The same formula in another order of fp32 operations; in bf16 results are rounded to 8 bits, and gains' gradients are sums of 30 terms.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


def results(dtype: torch.dtype, *, is_own: bool) -> list[Tensor]:
    """Output and gradients of values and gain, as fp32."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(5, 6, 24, generator=generator).to(dtype).requires_grad_()
    gain = torch.randn(24, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(5, 6, 24, generator=generator).to(dtype)
    out = rms_norm(values, gain, 1e-5) if is_own else F.rms_norm(values.float(), (24,), gain.float(), 1e-5).to(dtype)
    (out * weights).sum().backward()
    assert values.grad is not None and gain.grad is not None
    return [tensor.detach().float() for tensor in (out, values.grad, gain.grad)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_output_and_gradients_are_those_of_torchs_composition_in_fp32(dtype: torch.dtype) -> None:
    for own, expected in zip(results(dtype, is_own=True), results(dtype, is_own=False), strict=True):
        assert (own - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def test_nothing_is_kept_for_backward_but_the_input_the_gain_and_a_number_per_row() -> None:
    norm = make_norm(small_config(normalization="RMSNorm"), 24, torch.bfloat16)
    norm.load_state_dict({"weight": torch.ones(24, dtype=torch.bfloat16)}, assign=True)
    values = torch.randn(5, 24).bfloat16().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        norm(values)
    assert {tuple(tensor.shape) for tensor in kept} == {(5, 24), (24,), (5, 1)}
    assert all(tensor.dtype == torch.bfloat16 for tensor in kept if tensor.numel() == 5 * 24)


def test_large_values_do_not_overflow_in_half_precision() -> None:
    values = torch.full((2, 8), 3e4, dtype=torch.float16)
    assert rms_norm(values, torch.ones(8, dtype=torch.float16), 1e-5).eq(1).all()


def test_a_second_derivative_is_an_error_rather_than_one_without_the_terms_of_the_scale() -> None:
    values = torch.randn(3, 8, generator=torch.Generator().manual_seed(4)).requires_grad_()
    (grad,) = torch.autograd.grad(rms_norm(values, torch.ones(8), 1e-5).square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
