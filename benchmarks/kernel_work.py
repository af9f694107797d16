"""Counts, without a GPU, what the CUDA kernels ask of one: instructions and sectors of memory, per byte of their tensors.

    python -m benchmarks.kernel_work --output benchmarks/results/kernel_work.json

Every call that gpu_check.sh times is run on a machine for PTX (testbed/kernels/ptx_machine/), which needs nvcc. PTX is what nvcc gives to
ptxas; a GPU executes about two thirds as many instructions, because most moves vanish. Of half rate are integers without their products,
logic, shifts, comparisons, selections, minima, maxima and roundings to 16 bits: a multiprocessor has units for 64 per clock, and issues 128
instructions. A sector is 32 bytes, the least that moves between memory and a GPU; where the sectors of a warp's accesses have as many bytes
as the call, no access moves more than it needs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.report import report
from testbed.kernels.device_code import nvcc_version, work_on_ptx
from testbed.kernels.device_work import Work

SLICES, RUN_NUMEL, BLOCK_NUMEL = 2, 32768, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write the figures to")
    args = parser.parse_args()
    if shutil.which("nvcc") is None:
        parser.error("nvcc is not on PATH; it is in the folder bin of CUDA's toolkit")
    calls = work_on_ptx(SLICES, RUN_NUMEL, BLOCK_NUMEL)
    release = re.search(r"release (\d+\.\d+)", nvcc_version())
    setting = {"nvcc": release[1] if release else nvcc_version(), "slices": SLICES, "row_numel": RUN_NUMEL, "block_numel": BLOCK_NUMEL}
    report("kernel_work", sys.argv[1:], setting, table(calls), {"calls": [asdict(call) for call in calls]}, args.output)


def table(calls: Iterable[Work]) -> str:
    rows = ["| codes | call | PTX instructions per byte | of half rate | sectors / bytes |", "| --- | --- | ---: | ---: | ---: |"]
    return "\n".join([*rows, *map(_row, calls)])


def _row(call: Work) -> str:
    counts = f"{call.instructions / call.nbytes:.1f} | {call.half_rate / call.nbytes:.1f}"
    return f"| {call.codes} | {call.name} | {counts} | {call.sector_bytes / call.nbytes:.3f} |"


if __name__ == "__main__":
    main()
