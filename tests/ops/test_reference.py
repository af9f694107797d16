from __future__ import annotations

import numpy as np
import pytest
import torch
from harness.per_block import decoded_row, encoded_row, equal_bits, narrowed, widened
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.ops import reference
from megatron_zpp.ops.payload import coded_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = [4, 8]
BLOCK = 32
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}

any_bits = st.integers(0, 2**32 - 1)
finite_bits = any_bits.filter(lambda bits: bits & 0x7F800000 != 0x7F800000)


def _values(bits: list[int], dtype: torch.dtype) -> Tensor:
    """Values whose bits are the upper ones of `bits`; every pattern of each dtype is possible."""
    if dtype == torch.float32:
        return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))
    return torch.from_numpy(np.array([some >> 16 for some in bits], dtype=np.uint16).view(np.int16)).view(dtype)


def _encoded(values: Tensor, bits: int, block_numel: int = BLOCK) -> Tensor:
    payloads = torch.zeros(values.shape[0], coded_bytes(values.shape[1], bits, block_numel), dtype=torch.uint8)
    reference.encode_blocks(values, payloads, bits, block_numel)
    return payloads


def _decoded(payloads: Tensor, row_numel: int, bits: int, dtype: torch.dtype = torch.float32, block_numel: int = BLOCK) -> Tensor:
    values = torch.empty(payloads.shape[0], row_numel, dtype=dtype)
    reference.decode_blocks(payloads, values, bits, block_numel)
    return values


def _block(*values: float) -> Tensor:
    return torch.tensor([[*values, *[0.0] * (BLOCK - len(values))]])


def test_golden_8_bit_block() -> None:
    payload = _encoded(_block(127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.4), bits=8)
    assert bytes(payload[0, :8].tolist()) == bytes([0x7F, 0x81, 0, 2, 2, 0, 0xFE, 0x7E])
    assert bytes(payload[0, 8:32].tolist()) == bytes(24)
    assert bytes(payload[0, 32:].tolist()) == bytes([0, 0, 0x80, 0x3F]) + bytes(12)  # scale 1.0


def test_golden_4_bit_block_has_the_even_code_in_the_low_nibble() -> None:
    payload = _encoded(_block(14.0, -14.0, 1.0, 3.0, 5.0, -2.0, 0.0, 7.0), bits=4)
    # codes 7 -7 | 0 2 (1.5 to even) | 2 (2.5 to even) -1 | 0 4 (3.5 to even)
    assert bytes(payload[0, :4].tolist()) == bytes([0x97, 0x20, 0xF2, 0x40])
    assert bytes(payload[0, 16:20].tolist()) == bytes([0, 0, 0, 0x40])  # scale 2.0


@settings(max_examples=200)
@given(st.lists(any_bits, min_size=64, max_size=64), st.sampled_from(DTYPES), st.sampled_from(BITS))
def test_any_bits_encode_as_in_the_per_block_implementation(some_bits: list[int], dtype: torch.dtype, bits: int) -> None:
    values = _values(some_bits, dtype)
    assert bytes(_encoded(values.view(1, -1), bits)[0].tolist()) == encoded_row(widened(values), bits, BLOCK)


@settings(max_examples=200)
@given(st.lists(st.integers(-1000, 1000), min_size=64, max_size=64), st.integers(-150, 100), st.sampled_from(DTYPES), st.sampled_from(BITS))
def test_values_of_one_magnitude_encode_and_decode_as_in_the_per_block_implementation(
    integers: list[int], exponent: int, dtype: torch.dtype, bits: int
) -> None:
    values = torch.ldexp(torch.tensor(integers, dtype=torch.float64), torch.tensor(exponent)).to(dtype)
    row = encoded_row(widened(values), bits, BLOCK)
    payload = _encoded(values.view(1, -1), bits)
    assert bytes(payload[0].tolist()) == row
    for output in DTYPES:
        assert equal_bits(_decoded(payload, 64, bits, output)[0], narrowed(decoded_row(row, 64, bits, BLOCK), output))


@settings(max_examples=100)
@given(st.binary(min_size=48, max_size=48), st.sampled_from(DTYPES), st.sampled_from(BITS))
def test_any_bytes_decode_as_in_the_per_block_implementation(row: bytes, output: torch.dtype, bits: int) -> None:
    payload = torch.tensor(list(row), dtype=torch.uint8).view(1, -1)
    assert equal_bits(_decoded(payload, BLOCK, bits, output)[0], narrowed(decoded_row(row, BLOCK, bits, BLOCK), output))


@settings(max_examples=150)
@given(st.lists(finite_bits, min_size=32, max_size=32), st.sampled_from(DTYPES), st.sampled_from(BITS))
def test_the_error_is_at_most_half_a_step(some_bits: list[int], dtype: torch.dtype, bits: int) -> None:
    values = _values(some_bits, dtype).view(1, -1)
    values = torch.where(values.isfinite(), values, 1).to(dtype)
    decoded = _decoded(_encoded(values, bits), BLOCK, bits, dtype)
    wide, largest_code = values.double(), 2 ** (bits - 1) - 1
    scale = wide.abs().max().item() / largest_code
    if scale < 2.0**-126 or wide.abs().max().item() > 0.99 * torch.finfo(dtype).max:
        return  # subnormal scales are coarser than their values; the largest values may round up to infinity
    # Half a step; four fp32 roundings (scale, quotient, product) of at most the largest value; one rounding to the output.
    bound = scale / 2 + 4 * 2.0**-24 * scale * largest_code + UNIT_ROUNDOFF[dtype] * wide.abs() * (1 + 1 / largest_code) + SMALLEST[dtype]
    bound = bound + UNIT_ROUNDOFF[dtype] * scale
    assert ((decoded.double() - wide).abs() <= bound).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 31, 32, 63, 64, 95])
def test_one_value_that_is_not_finite_spoils_its_block_and_no_other(bits: int, dtype: torch.dtype, bad: float, position: int) -> None:
    values = torch.ones(1, 96, dtype=dtype)
    values[0, position] = bad
    decoded = _decoded(_encoded(values, bits), 96, bits, dtype)
    is_in_block = torch.arange(96) // BLOCK == position // BLOCK
    assert torch.equal(decoded[0].isnan(), is_in_block)
    assert (decoded[0, ~is_in_block] == 1).all()


@pytest.mark.parametrize("bits", BITS)
def test_zeros_of_both_signs_and_values_whose_scale_underflows_decode_to_zero(bits: int) -> None:
    for value in (0.0, -0.0, 2.0**-149, -3 * 2.0**-149):
        payload = _encoded(_block(value), bits)
        assert not payload.any()
        assert equal_bits(_decoded(payload, BLOCK, bits), torch.zeros(1, BLOCK))


@pytest.mark.parametrize("members", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", BITS)
def test_the_mean_is_the_true_mean(members: int, bits: int) -> None:
    codes = torch.randint(-7, 8, (members, 1, BLOCK), generator=torch.Generator().manual_seed(members)).float()
    codes[:, :, 0] = 2 ** (bits - 1) - 1  # so that scales are powers of two and nothing is lost
    scales = 2.0 ** torch.arange(members).view(-1, 1, 1)
    payloads = torch.stack([_encoded(values, bits) for values in codes * scales])
    mean = torch.empty(1, BLOCK)
    reference.decode_mean_blocks(payloads, mean, bits, BLOCK, accumulate=False)
    # The sums are small integers, exact in any order; one division rounds.
    exact = (codes * scales).double().sum(0) / members
    assert torch.equal(mean, exact.float())


def test_accumulating_adds_the_mean_with_one_rounding() -> None:
    payloads = torch.stack([_encoded(_block(127.0, value), 8) for value in (1.0, 2.0)])
    mean = torch.full((1, BLOCK), 2.0**24)
    reference.decode_mean_blocks(payloads, mean, 8, BLOCK, accumulate=True)
    assert mean[0, :3].tolist() == [2.0**24 + 128, 2.0**24 + 2, 2.0**24]  # 127 and 1.5 added to floats that are 2 apart


@settings(max_examples=40)
@given(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4), st.sampled_from(BITS), st.sampled_from(BITS))
def test_recoding_is_the_mean_and_then_encoding(slices: int, blocks: int, members: int, bits: int, next_bits: int) -> None:
    row_numel = blocks * BLOCK
    values = torch.randn(members, slices, row_numel, generator=torch.Generator().manual_seed(blocks))
    payloads = torch.stack([_encoded(member, bits) for member in values])
    mean = torch.empty(slices, row_numel)
    reference.decode_mean_blocks(payloads, mean, bits, BLOCK, accumulate=False)
    recoded = torch.zeros(slices, coded_bytes(row_numel, next_bits, BLOCK), dtype=torch.uint8)
    reference.recode_mean_blocks(payloads, recoded, row_numel, bits, next_bits, BLOCK)
    assert torch.equal(recoded, _encoded(mean, next_bits))
