"""Tests codes, means and errors of values under the Hadamard transform of 32 neighbours, on the reference, which the kernels equal."""

from __future__ import annotations

import pytest
import torch
from harness.block_numbers import ROUNDOFF, hadamard, rotated, worst_error
from harness.per_block import equal_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.ops import reference
from megatron_zpp.ops.payload import coded_bytes

BITS = (4, 8)
GROUP = 32


def _encoded(values: Tensor, bits: int, block_numel: int, is_rotated: bool = True) -> Tensor:
    payloads = torch.zeros(values.shape[0], coded_bytes(values.shape[1], bits, block_numel), dtype=torch.uint8)
    reference.encode_blocks(values, payloads, bits, block_numel, is_rotated)
    return payloads


def _mean(payloads: Tensor, row_numel: int, bits: int, block_numel: int, is_rotated: bool = True) -> Tensor:
    mean = torch.empty(payloads.shape[1], row_numel)
    reference.decode_mean_blocks(payloads, mean, bits, block_numel, accumulate=False, rotated=is_rotated)
    return mean


def _heavy_tailed(members: int, row_numel: int) -> Tensor:
    values = torch.randn(members, 2, row_numel, generator=torch.Generator().manual_seed(row_numel))
    return values * torch.where(values.abs() > 2, 10.0, 1.0)


def test_the_hadamard_matrix_is_symmetric_and_its_own_inverse_but_for_a_factor_of_32() -> None:
    assert torch.equal(hadamard(), hadamard().T)
    assert torch.equal(hadamard() @ hadamard(), 32 * torch.eye(32, dtype=torch.float64))


@settings(max_examples=100)
@given(st.lists(st.integers(-(2**18), 2**18), min_size=128, max_size=128), st.sampled_from(BITS), st.sampled_from([32, 64, 128]))
def test_codes_of_rotated_values_are_those_of_the_product_with_the_hadamard_matrix(values: list[int], bits: int, block_numel: int) -> None:
    # Sums of 32 such integers are below 2^24: fp32 holds them all.
    wide = torch.tensor([values], dtype=torch.float32)
    expected = _encoded(rotated(wide).float(), bits, block_numel, is_rotated=False)
    assert equal_bits(_encoded(wide, bits, block_numel), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_the_mean_of_rotated_payloads_is_their_mean_times_the_inverse_matrix(members: int, bits: int) -> None:
    payloads = torch.stack([_encoded(values, bits, 64) for values in _heavy_tailed(members, 640)])
    in_rotated_space = _mean(payloads, 640, bits, 64, is_rotated=False)
    exact = rotated(in_rotated_space) / 32
    # Five stages round once each, none of a result above the sum of magnitudes; dividing by 32 is exact.
    magnitude = in_rotated_space.double().abs().view(-1, GROUP).sum(1, keepdim=True).expand(-1, GROUP).reshape(exact.shape) / 32
    assert ((_mean(payloads, 640, bits, 64).double() - exact).abs() <= 5 * ROUNDOFF * 1.001 * magnitude).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("next_bits", BITS)
def test_two_hops_of_rotated_values_end_in_the_true_mean_within_half_a_step_of_each(bits: int, next_bits: int) -> None:
    first, second, row_numel, block_numel = 2, 3, 512, 128
    values = _heavy_tailed(first * second, row_numel)
    payloads = torch.stack([_encoded(each, bits, block_numel) for each in values]).view(second, first, 2, -1)
    recoded = torch.zeros(second, 2, coded_bytes(row_numel, next_bits, block_numel), dtype=torch.uint8)
    for group, target in zip(payloads, recoded, strict=True):
        reference.recode_mean_blocks(group, target, row_numel, bits, next_bits, block_numel)
    # In rotated space each hop is within half a step of its block; the inverse takes the average of 32 errors, whatever their signs.
    # Beside those, fp32 sums are off by their roundoff times the sum of the group's magnitudes.
    in_rotated_space = rotated(values)
    first_errors = worst_error(in_rotated_space, bits, block_numel)
    means = in_rotated_space.view(second, first, 2, row_numel).mean(1)
    reached = (first_errors.view(second, first, 2, row_numel).mean(1) + means.abs()).view(second, 2, -1, block_numel)
    second_errors = reached.amax(-1, keepdim=True) / (2 * (2 ** (next_bits - 1) - 1)) * (1 + 600 * ROUNDOFF)
    bound = first_errors.mean(0) + second_errors.expand(reached.shape).reshape(means.shape).mean(0)
    magnitude = 32 * values.abs().amax(0).view(2, -1, block_numel).amax(-1, keepdim=True).expand(-1, -1, block_numel).reshape(2, row_numel)
    error = (_mean(recoded, row_numel, next_bits, block_numel).double() - values.double().mean(0)).abs()
    assert (error <= bound + 20 * ROUNDOFF * magnitude).all()


@pytest.mark.parametrize("position", [0, 100, 255])
def test_rotation_spreads_an_outlier_whose_block_would_lose_all_other_values(position: int) -> None:
    signs = torch.randn(1, 256, generator=torch.Generator().manual_seed(position)).sign()
    values = signs.clone()
    values[0, position] *= 16
    plain = _mean(_encoded(values, 4, 256, is_rotated=False).unsqueeze(0), 256, 4, 256, is_rotated=False)
    # A step is 16 / 7, and 1 is less than half of it: everything but the outlier is lost.
    assert (plain - values).square().sum() >= 255
    spread = _mean(_encoded(values, 4, 256).unsqueeze(0), 256, 4, 256)
    # Rotated values are at most 16 + 31, so errors at most half of 47 / 7; the inverse divides the sum of their squares by 32.
    assert (spread - values).square().sum() <= 256 * (47 / 14) ** 2 / 32 * 1.001 < 255 / 2.8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 33, 95])
def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other(position: int, bad: float) -> None:
    values = torch.ones(1, 96)
    values[0, position] = bad
    mean = _mean(_encoded(values, 8, 32).unsqueeze(0), 96, 8, 32)
    assert torch.equal(mean[0].isnan(), torch.arange(96) // 32 == position // 32)


def test_a_sum_that_overflows_makes_its_block_nan() -> None:
    values = torch.full((1, 64), 2.0**123)
    values[0, :32] = 2.0**122
    mean = _mean(_encoded(values, 8, 32).unsqueeze(0), 64, 8, 32)
    assert torch.equal(mean[0, :32], torch.full((32,), 2.0**122)) and mean[0, 32:].isnan().all()


def test_padding_behind_values_of_its_group_comes_back_as_something_small() -> None:
    values = torch.zeros(1, 96)
    values[0, :45] = torch.randn(45, generator=torch.Generator().manual_seed(1))
    mean = _mean(_encoded(values, 4, 96).unsqueeze(0), 96, 4, 96)[0]
    assert mean[45:64].any() and not mean[64:].any()
