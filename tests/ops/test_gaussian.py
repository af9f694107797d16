"""Tests the Gaussian codes: their bytes, their error, and that they leave no bias; on the reference, which the kernels equal."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.ops import gaussian_reference
from megatron_zpp.ops.gaussian import decode_gaussian, decode_mean_gaussian, encode_gaussian
from megatron_zpp.ops.payload import gaussian_bytes

BLOCK = 256
BITS = (1, 2, 3, 4)
ERRORS = {1: 0.568, 2: 0.131, 3: 0.0354, 4: 0.0094}  # shares of the variance of a Gaussian
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.usefixtures("no_kernels")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoded(values: Tensor, bits: int, rounds: int, key: int = 1) -> Tensor:
    payloads = torch.zeros(values.shape[0], gaussian_bytes(values.shape[1], bits), dtype=torch.uint8)
    encode_gaussian(values, payloads, bits=bits, rounds=rounds, key=key)
    return payloads


def decoded(payloads: Tensor, row_numel: int, bits: int, rounds: int, key: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.empty(payloads.shape[0], row_numel, dtype=dtype)
    decode_gaussian(payloads, values, bits=bits, rounds=rounds, keys=[key] * payloads.shape[0])
    return values


def crossed(values: Tensor, bits: int, rounds: int, key: int = 1) -> Tensor:
    """What arrives of the values."""
    return decoded(encoded(values, bits, rounds, key), values.shape[1], bits, rounds, key)


def error_share(arrived: Tensor, values: Tensor) -> float:
    return float((arrived.double() - values.double()).square().sum() / values.double().square().sum())


# ---- bytes


@given(st.integers(0, 40), st.sampled_from(BITS))
def test_a_block_takes_two_bytes_of_scale_padded_once_per_row_and_32_bytes_per_bit(blocks: int, bits: int) -> None:
    assert gaussian_bytes(blocks * BLOCK, bits) == 2 * blocks + -2 * blocks % 16 + 32 * bits * blocks
    if blocks % 8 == 0:
        assert gaussian_bytes(blocks * BLOCK, bits) == blocks * {1: 34, 2: 66, 3: 98, 4: 130}[bits]


@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_all_scales_then_the_planes_of_each_block_which_decode_as_defined_on_paper(bits: int) -> None:
    values = normal(1, 3 * BLOCK, seed=bits)
    row = encoded(values, bits, rounds=1, key=7)[0]
    signs = gaussian_reference.random_signs(7, 1)[0].double()
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(BLOCK)] for i in range(BLOCK)], dtype=torch.float64)
    levels = torch.tensor(gaussian_reference.LEVELS[bits], dtype=torch.float64)
    for block in range(3):
        scale = row[2 * block : 2 * block + 2].clone().view(torch.bfloat16).double()
        planes = row[16 + block * 32 * bits :][: 32 * bits].view(bits, 32)
        digits = (planes.unsqueeze(-1) >> torch.arange(8) & 1).view(bits, BLOCK).long()
        magnitudes = sum((digit << place for place, digit in enumerate(digits[1:])), torch.zeros(BLOCK, dtype=torch.int64))
        levelled = levels[magnitudes] * (1 - 2 * digits[0])
        rotated = matrix @ (signs * values[0, block * BLOCK : (block + 1) * BLOCK].double()) / 16
        assert scale == (rotated.square().sum() / (rotated * levelled).sum()).bfloat16()
        nearest = (rotated.abs().unsqueeze(1) / rotated.square().mean().sqrt() - levels).abs().argmin(1)
        assert torch.equal(nearest, magnitudes)
        expected = signs * (matrix @ (levelled * scale)) / 16
        found = decoded(row.unsqueeze(0), 3 * BLOCK, bits, 1, key=7)[0, block * BLOCK : (block + 1) * BLOCK]
        assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("bits", BITS)
def test_two_rounds_rotate_once_more_with_other_signs(bits: int) -> None:
    values = normal(1, BLOCK, seed=bits)
    first, second = gaussian_reference.random_signs(9, 2)
    once = gaussian_reference.hadamard(values * first) / 16
    assert torch.equal(gaussian_reference.random_signs(9, 1)[0], first) and not torch.equal(first, second)
    payload = encoded(values, bits, rounds=2, key=9)
    codes = decoded(payload, BLOCK, bits, 2, key=9)
    twice = gaussian_reference.hadamard(once * second) / 16
    scale = payload[0, :2].clone().view(torch.bfloat16).float()
    levelled = gaussian_reference.hadamard(gaussian_reference.hadamard(codes * first) / 16 * second) / 16 / scale
    assert torch.equal(levelled.signbit(), twice.signbit())
    levels = torch.tensor(gaussian_reference.LEVELS[bits])
    assert ((levelled.abs().view(-1, 1) - levels).abs().amin(1) < 1e-5).all()


# ---- error and bias


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("bits", BITS)
def test_the_error_on_gaussian_values_is_that_of_a_quantizer_made_for_them(bits: int, rounds: int) -> None:
    values = normal(1, 2048 * BLOCK, seed=10 * bits + rounds)
    assert abs(error_share(crossed(values, bits, rounds), values) / ERRORS[bits] - 1) < 0.03


def heavy_tailed() -> Tensor:
    """Student's t with 2 degrees of freedom."""
    return normal(BLOCK, seed=1) / (normal(2, BLOCK, seed=2).square().sum(0) / 2).sqrt()


def sparse() -> Tensor:
    values = torch.zeros(BLOCK)
    values[torch.tensor([3, 77, 130, 255])] = torch.tensor([1.0, -2.0, 0.5, 1.5])
    return values


def spike() -> Tensor:
    values = torch.zeros(BLOCK)
    values[:2] = torch.tensor([1.0, 0.3])
    return values


def z_scores(values: Tensor, bits: int, rounds: int, draws: int) -> Tensor:
    """How many of its standard errors the mean of each value over many draws of the signs is away from the value."""
    arrived = torch.cat([crossed(values.view(1, -1), bits, rounds, key) for key in range(draws)]).double()
    return (arrived.mean(0) - values.double()) / (arrived.std(0) / draws**0.5)


@pytest.mark.long
@pytest.mark.parametrize("make", [normal, heavy_tailed, sparse, spike], ids=lambda make: make.__name__)
@pytest.mark.parametrize("bits", BITS)
def test_two_rounds_leave_no_bias_over_4096_draws_of_the_signs(bits: int, make: object) -> None:
    values = normal(BLOCK) if make is normal else make()
    scores = z_scores(values, bits, rounds=2, draws=4096)
    # The scale is rounded to bf16: its error, at most 2^-9, differs from draw to draw.
    assert abs(float(scores.square().mean().sqrt()) - 1) < 0.1
    assert float(scores.abs().max()) < 6


@pytest.mark.parametrize("make", [heavy_tailed, sparse])
def test_two_rounds_leave_no_bias_over_few_draws(make: object) -> None:
    scores = z_scores(make(), bits=2, rounds=2, draws=256)
    assert 0.8 < float(scores.square().mean().sqrt()) < 1.2


def test_one_round_leaves_bias_where_two_values_of_a_block_are_not_zero() -> None:
    arrived = torch.cat([crossed(spike().view(1, -1), 2, 1, key) for key in range(256)])
    assert error_share(arrived.mean(0), spike()) > 0.02


@pytest.mark.parametrize("rounds", [1, 2])
def test_errors_of_senders_with_the_same_values_cancel_because_each_draws_its_own_signs(rounds: int) -> None:
    values, members = normal(1, 64 * BLOCK, seed=4), 32
    keys = list(range(members))
    payloads = torch.stack([encoded(values, 3, rounds, key) for key in keys])
    mean = torch.empty_like(values)
    decode_mean_gaussian(payloads, mean, bits=3, rounds=rounds, keys=keys, accumulate=False)
    assert error_share(mean, values) < 0.003
    shared = torch.stack([encoded(values, 3, rounds, 0)] * members)
    decode_mean_gaussian(shared, mean, bits=3, rounds=rounds, keys=[0] * members, accumulate=False)
    assert error_share(mean, values) > 0.03


def test_what_a_receiver_adds_up_from_differences_follows_values_that_move() -> None:
    # Each difference is that to the copy, so what one message loses is part of the next.
    values, copy = normal(1, 16 * BLOCK, seed=5), torch.zeros(1, 16 * BLOCK)
    for step in range(60):
        values = values + 0.01 * normal(1, 16 * BLOCK, seed=100 + step)
        payloads = encoded(values - copy, 1, 1, key=step)
        decode_gaussian(payloads, copy, bits=1, rounds=1, keys=[step], accumulate=True)
    residual = float((values - copy).square().mean()) / 0.01**2
    assert abs(residual - 1.33) < 0.15  # error / (1 - error) of an update, with an error of 0.57


# ---- signs


def test_signs_are_even_and_differ_between_rounds_keys_and_places() -> None:
    signs = torch.stack([gaussian_reference.random_signs(key, 2) for key in range(256)]).view(256, -1)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    standard_error = signs.numel() ** -0.5
    assert abs(float(signs.mean())) < 5 * standard_error
    products = signs @ signs.T / signs.shape[1]
    assert float((products - torch.eye(256)).abs().max()) < 6 * signs.shape[1] ** -0.5
    columns = signs.T @ signs / signs.shape[0]
    assert float((columns - torch.eye(signs.shape[1])).abs().max()) < 6.5 * signs.shape[0] ** -0.5


# ---- values that are not ordinary


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_value_that_is_not_finite_decodes_to_nan_as_a_whole_and_no_other_block_does(
    bad: float, bits: int, rounds: int
) -> None:
    values = normal(1, 3 * BLOCK)
    values[0, BLOCK + 17] = bad
    payloads = encoded(values, bits, rounds)
    for dtype in DTYPES:
        is_nan = decoded(payloads, 3 * BLOCK, bits, rounds, dtype=dtype).isnan().view(3, BLOCK)
        assert is_nan[1].all() and not is_nan[0].any() and not is_nan[2].any()
    assert payloads[0, 2:4].tolist() == [0xC0, 0x7F] and not payloads[0, 16 + 32 * bits : 16 + 64 * bits].any()


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("bits", BITS)
def test_zeros_decode_to_zeros_and_have_the_code_0(bits: int, rounds: int) -> None:
    values = torch.zeros(1, 2 * BLOCK)
    values[0, ::3] = -0.0
    payloads = encoded(values, bits, rounds)
    assert not payloads.any() and not decoded(payloads, 2 * BLOCK, bits, rounds).any()


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_values_whose_squares_no_fp32_holds_have_the_error_of_others(scale: float, bits: int, rounds: int) -> None:
    values = normal(1, 256 * BLOCK, seed=3)
    values = values * scale
    assert abs(error_share(crossed(values, bits, rounds), values) / ERRORS[bits] - 1) < 0.06


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("power", [-60, -3, 1, 70])
def test_a_power_of_two_scales_what_is_decoded_and_changes_no_code(power: int, rounds: int) -> None:
    values = normal(1, 4 * BLOCK, seed=6)
    payloads, scaled = encoded(values, 3, rounds), encoded(values * 2.0**power, 3, rounds)
    assert torch.equal(payloads[:, 16:], scaled[:, 16:])
    expected = decoded(payloads, 4 * BLOCK, 3, rounds) * 2.0**power
    assert torch.equal(decoded(scaled, 4 * BLOCK, 3, rounds), expected)


def test_values_near_the_largest_of_fp32_decode_to_nan_rather_than_to_numbers_of_another_size() -> None:
    values = torch.full((1, BLOCK), torch.finfo(torch.float32).max)
    values *= gaussian_reference.random_signs(1, 1) * normal(1, BLOCK).sign()
    assert crossed(values, 1, 1).isnan().all()


def test_accumulated_values_are_sums_in_fp32_rounded_once() -> None:
    values, before = normal(2, 2 * BLOCK), normal(2, 2 * BLOCK, seed=1)
    payloads = encoded(values, 3, 1)
    arrived = decoded(payloads, 2 * BLOCK, 3, 1)
    for dtype in DTYPES:
        copy = before.to(dtype)
        expected = (copy.float() + arrived).to(dtype)
        decode_gaussian(payloads, copy, bits=3, rounds=1, keys=[1, 1], accumulate=True)
        assert torch.equal(copy, expected)


def test_every_slice_decodes_with_the_key_of_its_sender() -> None:
    values = normal(3, BLOCK)
    payloads = torch.cat([encoded(values[index : index + 1], 4, 2, key) for index, key in enumerate((5, 6, 7))])
    arrived = torch.empty_like(values)
    decode_gaussian(payloads, arrived, bits=4, rounds=2, keys=[5, 6, 7])
    assert error_share(arrived, values) < 0.012
    decode_gaussian(payloads, arrived, bits=4, rounds=2, keys=[7, 6, 5])
    assert error_share(arrived[::2], values[::2]) > 1 and error_share(arrived[1], values[1]) < 0.012


# ---- errors

GOOD, GOOD_PAYLOADS = torch.zeros(2, 512), torch.zeros(2, 16 + 512 * 3 // 8, dtype=torch.uint8)
MISTAKES = [
    ({"bits": 5}, "bits is 5; expected 1, 2, 3 or 4."),
    ({"rounds": 3}, "rounds is 3; expected 1 or 2."),
    ({"key": -1}, "noise_key is -1; expected None or 0 to 9223372036854775807."),
    ({"values": torch.zeros(2, 500)}, "a row has 500 values; expected a multiple of 256."),
    ({"values": GOOD.double()}, "values is torch.float64; expected torch.float32 or torch.bfloat16 or torch.float16."),
    ({"payloads": GOOD_PAYLOADS[:, :-16].contiguous()}, "payloads has shape [2, 192]; expected [slices, at least 208 bytes]."),
    ({"payloads": GOOD_PAYLOADS[:1]}, "slices of payloads: 1; expected 2."),
]  # fmt: skip


@pytest.mark.parametrize("change, message", MISTAKES)
def test_errors_name_what_was_found_and_what_was_expected(change: dict[str, object], message: str) -> None:
    arguments = {"values": GOOD, "payloads": GOOD_PAYLOADS, "bits": 3, "rounds": 1, "key": 0} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        encode_gaussian(**arguments)


def test_a_message_without_its_key_is_an_error() -> None:
    with pytest.raises(ValueError, match="keys: 1; expected 2."):
        decode_gaussian(GOOD_PAYLOADS, GOOD, bits=3, rounds=1, keys=[0])
    with pytest.raises(ValueError, match="keys: 2; expected 1."):
        decode_mean_gaussian(GOOD_PAYLOADS.unsqueeze(0), GOOD, bits=3, rounds=1, keys=[0, 1], accumulate=False)
