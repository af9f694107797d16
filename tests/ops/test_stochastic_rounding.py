"""Tests that the noise of stochastic rounding is uniform and independent, and leaves no bias; on the reference, which the kernels equal."""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths

from megatron_zpp.ops import reference
from megatron_zpp.ops.build import SOURCES
from megatron_zpp.ops.payload import coded_bytes

BITS = (4, 8)
BLOCK = 256
NUMEL = 2**18
DEVIATION = 5.0  # standard errors: one test in two million would fail by chance, and keys are fixed

KEYS = [0, 1, 2**62, 2**63 - 1]


def _encoded(values: Tensor, bits: int, noise_key: int | None, rotated: bool = False) -> Tensor:
    payloads = torch.zeros(values.shape[0], coded_bytes(values.shape[1], bits, BLOCK), dtype=torch.uint8)
    reference.encode_blocks(values, payloads, bits, BLOCK, rotated, noise_key)
    return payloads


def _decoded(payloads: Tensor, row_numel: int, bits: int) -> Tensor:
    values = torch.empty(payloads.shape[0], row_numel)
    reference.decode_blocks(payloads, values, bits, BLOCK)
    return values


def _noise(key: int, numel: int) -> Tensor:
    return reference.noise(key, torch.arange(numel // 2))


def _correlation(left: Tensor, right: Tensor) -> float:
    """The correlation times the square root of the number of values; for independent values its standard error is 1."""
    return float((left * right).mean() * 12 * len(left) ** 0.5)


# ---- the noise


@pytest.mark.parametrize("key", KEYS)
def test_noise_has_the_mean_and_the_variance_of_a_uniform_value(key: int) -> None:
    noise = _noise(key, NUMEL).double()
    assert noise.abs().max() < 0.5 and torch.equal(noise * 2**17 % 2, torch.ones(NUMEL, dtype=torch.float64))
    # Uniform on (-1/2, 1/2): variance 1/12, fourth moment 1/80.
    assert abs(noise.mean()) <= DEVIATION * (1 / 12 / NUMEL) ** 0.5
    assert abs(noise.square().mean() - 1 / 12) <= DEVIATION * ((1 / 80 - 1 / 144) / NUMEL) ** 0.5


@pytest.mark.parametrize("key", KEYS)
def test_every_256th_of_the_range_is_drawn_equally_often(key: int) -> None:
    counts = torch.histc(_noise(key, NUMEL), 256, -0.5, 0.5).double()
    expected = NUMEL / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) <= DEVIATION * (2 * 255) ** 0.5


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 32, 256, 2**12, 2**16])
@pytest.mark.parametrize("key", KEYS)
def test_noise_of_values_at_any_distance_is_uncorrelated(key: int, distance: int) -> None:
    noise = _noise(key, NUMEL + 2**16).double()
    assert abs(_correlation(noise[:NUMEL], noise[distance : distance + NUMEL])) <= DEVIATION


@pytest.mark.parametrize("key", [0, 0x0123456789ABCDEF])
def test_noise_of_keys_that_differ_in_one_bit_or_by_one_is_uncorrelated_at_any_small_offset(key: int) -> None:
    noise = _noise(key, 2**14 + 16).double()
    for other in [*(key ^ 1 << bit for bit in range(63)), key + 1]:
        others = _noise(other, 2**14).double()
        for offset in (0, 1, 2, 16):
            assert abs(_correlation(noise[offset : offset + 2**14], others)) <= DEVIATION, (other, offset)


def test_half_of_all_bits_change_with_any_bit_of_the_pair_s_number() -> None:
    pairs = torch.arange(2**14) * 2654435761
    hashes = reference.pair_hashes(1, pairs)
    for bit in range(48):
        changed = hashes ^ reference.pair_hashes(1, pairs ^ 1 << bit)
        shares = torch.stack([(changed >> place & 1).double().mean() for place in range(32)])
        assert (shares - 0.5).abs().max() <= DEVIATION * 0.5 / 2**7, bit


KERNELS = f"""
#include "{SOURCES}/quantization/cpu/quotient_codes.h"
using namespace megatron_zpp;
extern "C" uint32_t hash(uint64_t key, int64_t pair) {{ return pair_hashes(noise_of(key), pair).at(0); }}
extern "C" void noisy_codes(const float* values, int64_t numel, float scale, uint64_t key, int64_t first_pair, uint8_t* codes) {{
  cpu::store_noisy<8>(values, numel, scale, noise_of(key), first_pair, codes);
}}
"""


@pytest.fixture(scope="module")
def kernels_alone(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Functions of the C++ kernels for numbers of pairs that no tensor here has."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(KERNELS)
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", *(f"-I{path}" for path in include_paths())]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, str(folder / "kernels.cpp"), "-o", str(folder / "kernels.so")], check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


def test_the_kernels_hashes_are_the_reference_s_also_beyond_32_bits(kernels_alone: ctypes.CDLL) -> None:
    hash_of = kernels_alone.hash
    hash_of.argtypes, hash_of.restype = (ctypes.c_uint64, ctypes.c_int64), ctypes.c_uint32
    pairs = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 5 * 2**32 + 7, 2**48]
    for key in KEYS:
        assert [hash_of(key, pair) for pair in pairs] == reference.pair_hashes(key, torch.tensor(pairs)).tolist()


@pytest.mark.parametrize("first_pair", [2**32 - 16, 2**32 - 144, 3 * 2**32 - 400, 2**32 - 512])
def test_a_block_whose_pairs_go_beyond_32_bits_draws_the_reference_s_noise(kernels_alone: ctypes.CDLL, first_pair: int) -> None:
    values, codes = torch.randn(1024, generator=torch.Generator().manual_seed(1)), torch.zeros(1024, dtype=torch.int8)
    scale = values.abs().max() / torch.tensor(127.0)
    pointer = ctypes.c_void_p
    arguments = (
        pointer(values.data_ptr()),
        ctypes.c_int64(1024),
        ctypes.c_float(scale.item()),
        ctypes.c_uint64(6),
        ctypes.c_int64(first_pair),
    )
    kernels_alone.noisy_codes(*arguments, pointer(codes.data_ptr()))
    quotients = (values / scale).clamp(-127, 127) + reference.noise(6, first_pair + torch.arange(512))
    assert torch.equal(codes, quotients.round().to(torch.int8))


# ---- codes


@pytest.mark.parametrize("bits", BITS)
def test_a_code_is_one_of_the_two_integers_beside_the_quotient(bits: int) -> None:
    values = torch.randn(1, 4 * BLOCK, generator=torch.Generator().manual_seed(bits))
    values[0, 0] = values.abs().max() * 3
    scales = values.view(-1, BLOCK).abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    for key in range(20):
        steps = (_decoded(_encoded(values, bits, key), 4 * BLOCK, bits) - values).view(-1, BLOCK) / scales
        assert steps.abs().max() <= 1 + 2.0**-14  # quotients of up to 127 and their sums with the noise are rounded


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_over_keys_is_the_value(bits: int) -> None:
    keys, largest_code = 1000, 2 ** (bits - 1) - 1
    values = torch.randn(1, BLOCK, generator=torch.Generator().manual_seed(bits))
    scale = values.abs().max().double() / largest_code
    decoded = torch.stack([_decoded(_encoded(values, bits, key), BLOCK, bits)[0] for key in range(keys)]).double()
    error = (decoded.mean(0) - values[0].double()) / scale
    fraction = (values[0].double() / scale) % 1
    # The probability of rounding up is the quotient's fraction, within 2^-17 for the steps of the noise, and roundings.
    variance = fraction * (1 - fraction)
    slack = 2.0**-16 + 2.0**-24 * largest_code * 3
    assert (error.abs() <= DEVIATION * ((variance + 1 / keys) / keys) ** 0.5 + slack).all()
    assert abs(error.mean()) <= DEVIATION * (variance.mean() / (keys * BLOCK)) ** 0.5 + slack


@pytest.mark.parametrize("bits", BITS)
def test_values_on_the_grid_stay_where_they_are(bits: int) -> None:
    largest_code = 2 ** (bits - 1) - 1
    codes = torch.arange(-largest_code, largest_code + 1).repeat(BLOCK)[:BLOCK].float()
    for power in (-20, 0, 13):
        values = (codes * 2.0**power).view(1, -1)
        for key in range(50):
            assert torch.equal(_encoded(values, bits, key), _encoded(values, bits, None))


@pytest.mark.parametrize("rotated", [False, True])
def test_a_key_gives_the_same_bits_always_and_other_keys_give_others(rotated: bool) -> None:
    values = torch.randn(2, BLOCK, generator=torch.Generator().manual_seed(1))
    payloads = [_encoded(values, 4, key, rotated) for key in (5, 5, 4, 6, 5 + 2**32, None)]
    assert torch.equal(payloads[0], payloads[1])
    assert all(not torch.equal(payloads[0], other) for other in payloads[2:])


def test_noise_counts_from_the_first_value_of_the_call_so_a_slice_alone_draws_what_the_first_one_draws() -> None:
    values = torch.randn(3, 4 * BLOCK, generator=torch.Generator().manual_seed(2))
    together = _encoded(values, 4, 9)
    assert torch.equal(_encoded(values[:1], 4, 9)[0], together[0])
    assert not torch.equal(_encoded(values[1:2], 4, 9)[0], together[1])
    assert torch.equal(_encoded(values.view(1, -1), 4, 9)[0, : 6 * BLOCK], together[:, : 2 * BLOCK].flatten())


@pytest.mark.parametrize("bits", BITS)
def test_blocks_of_zeros_and_blocks_that_are_not_finite_keep_codes_of_zero(bits: int) -> None:
    values = torch.zeros(1, 3 * BLOCK)
    values[0, BLOCK : 2 * BLOCK] = 2.0**-149
    values[0, 2 * BLOCK + 1] = float("nan")
    assert torch.equal(_encoded(values, bits, 1), _encoded(values, bits, None))


# ---- two hops


def _slope(values: Tensor, next_keys: list[int | None], keys: list[int | None]) -> float:
    """The slope of the result of two 4-bit hops of 2 ranks each for values [4, 1, run], against their true mean."""
    row_numel = values.shape[2]
    payloads = torch.stack([_encoded(each, 4, key) for each, key in zip(values, keys, strict=True)]).view(2, 2, 1, -1)
    recoded = torch.zeros_like(payloads[0])
    for node, target, key in zip(payloads, recoded, next_keys, strict=True):
        reference.recode_mean_blocks(node, target, row_numel, 4, 4, BLOCK, key)
    mean = torch.empty(1, row_numel)
    reference.decode_mean_blocks(recoded, mean, 4, BLOCK, accumulate=False)
    true_mean = values.double().mean(0)
    return float((mean.double() * true_mean).sum() / true_mean.square().sum())


def test_two_stochastic_hops_do_not_lean_as_two_nearest_ones_do() -> None:
    values = torch.randn(4, 1, 2**20, generator=torch.Generator().manual_seed(3))
    nearest = _slope(values, [None] * 2, [None] * 4)
    stochastic = _slope(values, [10, 11], [1, 2, 3, 4])
    # The variance of a code is at most a quarter step^2. Of 256 normal values the largest is about 2.9 deviations, a step 0.41 of them:
    # first hop 4 x (0.41^2 / 4) / 4^2, second hop, on means with half the variance, 2 x (0.41^2 / 2 / 4) / 2^2, beside the mean's 1/4.
    standard_error = (2 * (0.41**2 / 16) / 0.25 / values.shape[2]) ** 0.5
    assert abs(stochastic - 1) <= DEVIATION * standard_error < (nearest - 1) / 1.5
