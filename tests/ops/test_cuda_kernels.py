"""Tests indexing, arithmetic and bytes of the CUDA kernels, with their grids emulated on the CPU. Speed needs a GPU."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.forked import Forked
from harness.kernel_programs import compared, compared_on_ptx

from megatron_zpp.ops.build import Build
from testbed.kernels.device_code import SOURCES_OF_KERNELS, ptx
from testbed.kernels.emulation import emulated_kernels
from testbed.kernels.ptx_machine.module import Kernel, Module

pytestmark = pytest.mark.compiles
RESULTS_PER_SIZE = 360 + 174 + 12  # without options, with them, and next to ties
MEANS = 3 * 8 * 4 * 3  # dtypes x lengths x numbers of members x kinds of results


# A size for each number of threads that share a block: 4 or 8, 8, 32, 256, 512, and (long) 512 that hold half of it at a time.
@pytest.mark.parametrize(
    "sizes",
    [
        ["32:1", "256:33", "1024:9", "8192:1", "8224:1"],
        *(pytest.param(others, marks=pytest.mark.long) for others in (["32:65", "96:45"], ["992:2", "1056:2"], ["32800:1"])),
    ],
)
def test_emulated_kernels_bit_equal_the_reference(sizes: list[str]) -> None:
    assert compared("kernel_bits.py", emulated_kernels(), *sizes) == RESULTS_PER_SIZE * len(sizes)


def test_a_grid_smaller_than_the_work_goes_round_to_the_same_bits() -> None:
    assert compared("kernel_bits.py", emulated_kernels(), "32:200", EMULATED_GRID_LIMIT="2") == RESULTS_PER_SIZE


REFUSED = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
try:
    torch.ops.megatron_zpp.drop_values(torch.ones(8), torch.empty(8), 1, 0, 0, 1.0)
except RuntimeError as error:
    print(str(error).splitlines()[0], ctypes.CDLL(sys.argv[1]).cuda_on_cpu_last_error())
"""


def test_a_launch_that_is_refused_is_an_error_of_its_op_and_not_of_the_next_kernel_of_torch(tmp_path: Path) -> None:
    (tmp_path / "refused.py").write_text(REFUSED)
    done = Forked(tmp_path / "refused.py", emulated_kernels(), environment={**os.environ, "EMULATED_GRID_LIMIT": "0"}).finished()
    assert done.stdout == "drop_values could not be launched: invalid configuration argument 0\n", done.stderr


def test_emulated_kernels_touch_nothing_beside_their_rows_which_may_start_anywhere() -> None:
    assert compared("guarded_rows.py", emulated_kernels()) > 500


@pytest.mark.parametrize("library", [emulated_kernels, Build().make, Build(portable=True).make], ids=["cuda", "native", "portable"])
def test_any_scale_and_any_mean_give_the_reference_s_bits_nan_included(library: Callable[[], Path]) -> None:
    assert compared("odd_payloads.py", library()) == 110


@pytest.mark.parametrize("library", [emulated_kernels, Build().make, Build(portable=True).make], ids=["cuda", "native", "portable"])
def test_dropout_has_the_reference_s_bits_at_any_size_and_index_and_touches_nothing_beside_its_values(library: Callable[[], Path]) -> None:
    assert compared("dropout_bits.py", library()) == 240


def test_dropout_on_a_grid_smaller_than_the_work_goes_round_to_the_same_bits() -> None:
    assert compared("dropout_bits.py", emulated_kernels(), EMULATED_GRID_LIMIT="2") == 240


@pytest.mark.parametrize("library", [emulated_kernels, Build().make, Build(portable=True).make], ids=["cuda", "native", "portable"])
def test_means_have_the_reference_s_bits_at_any_size_and_place_and_touch_nothing_beside_their_rows(library: Callable[[], Path]) -> None:
    assert compared("mean_bits.py", library()) == MEANS


def test_means_on_a_grid_smaller_than_the_work_go_round_to_the_same_bits() -> None:
    assert compared("mean_bits.py", emulated_kernels(), EMULATED_GRID_LIMIT="2") == MEANS


def test_the_loss_is_within_its_rounding_of_fp64_with_the_same_bits_at_any_place_on_a_grid_smaller_than_the_work() -> None:
    assert compared("softmax_errors.py", emulated_kernels(), EMULATED_GRID_LIMIT="2") == 12


def test_the_loss_reaches_rows_that_are_2_to_the_31_elements_apart_and_refuses_what_would_leave_its_tensors() -> None:
    assert compared("softmax_limits.py", emulated_kernels()) == 7 + 8  # mistakes for each op


EXPONENTIAL = {"fma.rn.f32", "fma.rm.f32", "ex2.approx.ftz.f32"}  # of CUDA's expf, which is right within 2 ulps
ZERO = "0f00000000"


def contracted(kernel: Kernel) -> set[str]:
    """The fused products and sums of a kernel. Those with a factor that is always 0 are left out: they look for NaN, and are no result."""
    assignments = Counter(instruction.operands[0] for instruction in kernel.instructions if instruction.operands)
    moves = [instruction.operands for instruction in kernel.instructions if instruction.op == "mov.f32"]
    zeros = {ZERO, *(target for target, source in moves if source == ZERO and assignments[target] == 1)}
    fused = [instruction for instruction in kernel.instructions if re.fullmatch(r"(fma|mad)\.[a-z.]*f32", instruction.op)]
    return {instruction.op for instruction in fused if zeros.isdisjoint(instruction.operands[1:3])}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("source", SOURCES_OF_KERNELS)
def test_device_code_neither_contracts_nor_flushes_nor_approximates_beside_exponentials_of_the_loss(source: str) -> None:
    text = ptx(source).read_text()
    module = Module(text)
    found = set(re.findall(r"\b[a-z0-9.]*\.(?:ftz|approx|full)\b[a-z0-9.]*", text))
    assert found.union(*(contracted(module.kernel(name)) for name in module.names)) == (
        EXPONENTIAL if source.startswith("softmax/") else set()
    )
    assert set(re.findall(r"\bdiv\.[a-z.0-9]*f32", text)) <= {"div.rn.f32"}
    assert re.findall(r"\b(?:ld|st)\.local|\bred\.|\batom\.", text) == []


def most_resident_threads(text: str) -> int:
    """The most threads for which a kernel asks on one multiprocessor."""
    bounds = re.findall(r"^\.maxntid (\d+), 1, 1\n(?:\.minnctapersm (\d+))?", text, re.MULTILINE)
    return max(int(threads) * int(blocks or 1) for threads, blocks in bounds)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("source", SOURCES_OF_KERNELS)
def test_no_kernel_asks_for_more_threads_than_a_multiprocessor_has_which_ptxas_would_warn_of(source: str) -> None:
    """sm_80, sm_90, sm_100 and sm_103 have room for 2048 threads, sm_86 and all others for 1536."""
    asked = most_resident_threads(ptx(source).read_text())
    assert asked <= 2048
    assert asked <= 1536 or most_resident_threads(ptx(source, "sm_86").read_text()) <= 1536


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize(
    "program, results, kernels",
    [
        ("device_bits.py 256", 107, 68),
        *(
            pytest.param(*others, marks=pytest.mark.long)
            for others in (
                ("device_bits.py 32 256 1024 8192 8224", 251, 164),
                ("kernel_bits.py 32:1 256:33", 2 * RESULTS_PER_SIZE, 48),
                ("guarded_rows.py", 600, 72),
                ("odd_payloads.py", 110, 12),
                ("dropout_bits.py", 240, 3),
                ("mean_bits.py", MEANS, 5),
                ("gaussian_bits.py 5 rows:33", 706, 24),
                ("softmax_errors.py", 12, 12),
                ("softmax_limits.py", 15, 4),
            )
        ),
    ],
)
def test_what_nvcc_makes_of_the_kernels_has_the_reference_s_bits_touches_only_its_tensors_and_waits_where_threads_share_memory(
    program: str, results: int, kernels: int
) -> None:
    assert compared_on_ptx(*program.split()) == (results, kernels)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_kernels_without_their_barriers_are_noticed_on_the_machine_that_runs_what_nvcc_makes_of_them() -> None:
    with pytest.raises(AssertionError, match="another thread has written since the last barrier"):
        compared_on_ptx("device_bits.py", "8192", without="bar.sync \t0;")
