"""Calls every kernel of the library on a GPU.

    python -m benchmarks.gpu.kernel_program sanitizer
    python -m benchmarks.gpu.kernel_program counters SECONDS

The first makes few launches, for compute-sanitizer; the second profiles one launch of each call that is timed, for ncu.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu.deadline import Deadline
from megatron_zpp.ops import extension
from testbed.kernels.timed_ops import Op, timed_ops

PROGRAM = ("-m", "benchmarks.gpu.kernel_program")  # the words after python
SLICES, BLOCK_NUMEL, RUN_NUMEL = 4, 256, 8 * 2**20  # 64 MB of bf16 in all
# Values per block and per slice: a few threads share the smallest block, and a team of threads cannot hold the largest.
FEW = ((32, 8192), (256, 8192), (8224, 8 * 8224))
CALL_SECONDS = 10.0  # below which no further call is profiled


def own_ops(row_numel: int, block_numel: int) -> Iterator[Op]:
    """The calls of the library's own kernels."""
    return (op for op in timed_ops(SLICES, row_numel, block_numel) if "by torch" not in op[1])


def run_few() -> None:
    """All calls on few values: under compute-sanitizer a kernel is hundreds of times slower."""
    for block_numel, row_numel in FEW:
        for codes, op, make in own_ops(row_numel, block_numel):
            print(f"{codes}, {op}, blocks of {block_numel}", flush=True)
            make()[0]()
            torch.cuda.synchronize()


def run_profiled(time: Deadline) -> None:
    """Each call once, its kernel alone between start and stop of the profiler, as long as there is time."""
    runtime = torch.cuda.cudart()
    for codes, op, make in own_ops(RUN_NUMEL, BLOCK_NUMEL):
        if not time.has(CALL_SECONDS):
            return
        call, _ = make()
        torch.cuda.synchronize()
        print(f"{codes}, {op}", flush=True)
        runtime.cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        runtime.cudaProfilerStop()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    extension.load()
    if not extension.has_kernels_for("cuda"):
        sys.exit(extension.report("cuda"))
    if sys.argv[1] == "sanitizer":
        run_few()
    else:
        run_profiled(Deadline(float(sys.argv[2])))
