"""Tests that the kernels of Gaussian codes have the reference's bits: C++ for this processor, for AVX2 and for any, and emulated CUDA."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness.kernel_programs import compared
from harness.per_block import equal_bits
from torch import Tensor
from torch.utils.cpp_extension import include_paths

from megatron_zpp.ops import extension, gaussian, gaussian_reference
from megatron_zpp.ops.build import COMPILER_FLAGS, SOURCES, Build
from megatron_zpp.ops.payload import GAUSSIAN_BITS, GAUSSIAN_ROUNDS, gaussian_bytes
from testbed.kernels.bit_differences import Comparison
from testbed.kernels.emulation import emulated_kernels
from testbed.kernels.gaussian_bits import BLOCK, KEYS, check_all, encoded, kinds
from testbed.kernels.gaussian_bits import decoded as decoded_rows

pytestmark = pytest.mark.compiles
RESULTS_PER_SIZE = 598
ROWS_PER_SIZE = 112


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("blocks", [1, 19])
def test_kernels_bit_equal_the_reference_and_touch_nothing_beside_their_rows(blocks: int) -> None:
    check_all(comparison := Comparison(), blocks)
    assert comparison.count() == RESULTS_PER_SIZE


def test_portable_kernels_bit_equal_the_reference_too() -> None:
    assert compared("gaussian_bits.py", Build(portable=True).make(), "3") == RESULTS_PER_SIZE


def test_emulated_cuda_kernels_bit_equal_the_reference() -> None:
    assert compared("gaussian_bits.py", emulated_kernels(), "5") == RESULTS_PER_SIZE


def test_emulated_cuda_kernels_on_a_grid_smaller_than_the_work_go_round_to_the_same_bits() -> None:
    assert compared("gaussian_bits.py", emulated_kernels(), "rows:33", EMULATED_GRID_LIMIT="1") == ROWS_PER_SIZE


ONE_BLOCK = f"""
#include "{SOURCES}/gaussian/cpu/decode_block.h"
#include "{SOURCES}/gaussian/cpu/encode_block.h"
using namespace megatron_zpp;
template <int kBits>
void cross(float* values, int rounds, uint64_t key, uint8_t* planes, uint16_t* scale) {{
  const Noise noise = noise_of(key);
  const Signs signs[kMostRounds] = {{signs_of_round(noise, 0), signs_of_round(noise, 1)}};
  *scale = cpu::encode_gaussian_block<kBits>(values, rounds, signs, planes);
  float decoded[kGaussianNumel];
  cpu::decode_gaussian_block<kBits>(planes, *scale, rounds, signs, decoded);
  cpu::store_block(decoded, false, values);
}}
extern "C" void cross_block(float* values, int bits, int rounds, uint64_t key, uint8_t* planes, uint16_t* scale) {{
  const auto crossed = {{cross<1>, cross<2>, cross<3>, cross<4>}};
  crossed.begin()[bits - 1](values, rounds, key, planes, scale);
}}
"""


@pytest.fixture(scope="module")
def avx2_kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The C++ kernels of one block, compiled for processors with AVX2, which could contract products and sums."""
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "block.cpp").write_text(ONE_BLOCK)
    flags = ["-std=c++17", *COMPILER_FLAGS, "-fvisibility=default", "-mavx2", "-mfma", "-mf16c", "-fPIC", "-shared"]
    command = [os.environ.get("CXX", "c++"), *flags, *(f"-I{path}" for path in include_paths()), str(folder / "block.cpp")]
    subprocess.run([*command, "-o", str(folder / "block.so")], check=True)
    return ctypes.CDLL(str(folder / "block.so"))


@pytest.mark.parametrize("rounds", GAUSSIAN_ROUNDS)
@pytest.mark.parametrize("bits", GAUSSIAN_BITS)
def test_kernels_compiled_for_avx2_bit_equal_the_reference(avx2_kernels: ctypes.CDLL, bits: int, rounds: int) -> None:
    for values in kinds(torch.float32, BLOCK):
        payloads = encoded(gaussian_reference, values, bits, rounds, 7)
        arrived = decoded_rows(gaussian_reference, payloads, BLOCK, torch.float32, bits, rounds, [7] * len(values), False)
        rows = values.clone()
        for row, payload, expected in zip(rows, payloads, arrived, strict=True):
            planes, scale = torch.zeros(32 * bits, dtype=torch.uint8), torch.zeros(1, dtype=torch.bfloat16)
            addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (row, planes, scale)]
            avx2_kernels.cross_block(addresses[0], bits, rounds, ctypes.c_uint64(7), *addresses[1:])
            assert equal_bits(planes, payload[16 : 16 + 32 * bits])
            assert equal_bits(scale.view(torch.uint8), payload[:2])
            assert equal_bits(row, expected)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("kernels", "two_threads")
def test_two_threads_give_the_bits_of_one() -> None:
    values = torch.randn(3, 2**16, generator=torch.Generator().manual_seed(1)).bfloat16()

    def crossed() -> tuple[Tensor, Tensor]:
        payloads = encoded(torch.ops.megatron_zpp, values, 3, 2, 5)
        return payloads, decoded_rows(torch.ops.megatron_zpp, payloads, 2**16, torch.bfloat16, 3, 2, list(KEYS), True)

    in_parallel = crossed()
    torch.set_num_threads(1)
    assert all(equal_bits(left, right) for left, right in zip(in_parallel, crossed(), strict=True))


@pytest.mark.usefixtures("kernels")
def test_the_reference_takes_over_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Tensor]:
        values = torch.randn(2, 2 * BLOCK, generator=torch.Generator().manual_seed(5))
        payloads = torch.zeros(2, 2, gaussian_bytes(2 * BLOCK, 3), dtype=torch.uint8)
        for key, member in enumerate(payloads):
            gaussian.encode_gaussian(values, member, bits=3, rounds=2, key=key)
        arrived, mean = torch.ones(2, 2 * BLOCK, dtype=torch.float16), torch.ones(2, 2 * BLOCK)
        gaussian.decode_gaussian(payloads[1], arrived, bits=3, rounds=2, keys=[1, 1], accumulate=True)
        gaussian.decode_mean_gaussian(payloads, mean, bits=3, rounds=2, keys=[0, 1], accumulate=True)
        return [payloads, arrived, mean]

    with_kernels = results()
    monkeypatch.setattr(extension, "_loaded", None)
    monkeypatch.setattr(gaussian_reference, "encode_gaussian", _counted(gaussian_reference.encode_gaussian, calls := []))
    assert all(equal_bits(left, right) for left, right in zip(with_kernels, results(), strict=True))
    assert len(calls) == 2


def _counted(function: object, calls: list[object]) -> object:
    def count(*arguments: object) -> object:
        calls.append(arguments)
        return function(*arguments)

    return count


GOOD, GOOD_PAYLOADS = torch.zeros(2, 512), torch.zeros(2, 16 + 512 * 3 // 8, dtype=torch.uint8)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "op, arguments, message",
    [
        ("encode_gaussian", (GOOD, GOOD_PAYLOADS, 5, 1, 0), "bits must be 1, 2, 3 or 4, not 5"),
        ("encode_gaussian", (GOOD, GOOD_PAYLOADS, 3, 3, 0), "rounds must be 1 or 2, not 3"),
        ("encode_gaussian", (GOOD, GOOD_PAYLOADS, 3, 1, -1), "noise_key must be none or at least 0, not -1"),
        ("encode_gaussian", (GOOD[:, :300].contiguous(), GOOD_PAYLOADS, 3, 1, 0), "a row must have a multiple of 256 values, not 300"),
        ("encode_gaussian", (GOOD, GOOD_PAYLOADS, 4, 1, 0), "payloads must have rows of at least 272 bytes, not 208"),
        ("decode_gaussian", (GOOD_PAYLOADS, GOOD, 3, 1, [1], False), "keys must be 2, not 1"),
        ("decode_mean_gaussian", (GOOD_PAYLOADS, GOOD, 3, 1, [1], False), "payloads must have 3 dims, not 2"),
        ("decode_mean_gaussian", (GOOD_PAYLOADS.unsqueeze(0), GOOD, 3, 1, [1, 2], False), "keys must be 1, not 2"),
        ("decode_mean_gaussian", (GOOD_PAYLOADS.unsqueeze(0), GOOD.half(), 3, 1, [1], False), "mean must be float32, not Half"),
    ],
)
def test_kernels_called_past_the_python_checks_refuse_what_would_leave_their_tensors(
    op: str, arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        getattr(torch.ops.megatron_zpp, op)(*arguments)
