"""Runs every kernel under compute-sanitizer, which finds accesses outside of tensors, and races within a block."""

from __future__ import annotations

import os

from benchmarks.gpu.commands import python, require_program, run_program
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.files import write_text
from benchmarks.gpu.kernel_program import PROGRAM
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place, require_gpu, require_kernels

TOOLS = ("memcheck", "racecheck")
ERROR_CODE = 9
# Every tensor is an allocation of its own, so that what lies beside it belongs to nobody.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    require_gpu(place)
    require_kernels(place)
    require_program("compute-sanitizer")
    for left, tool in zip(range(len(TOOLS), 0, -1), TOOLS, strict=True):
        # Calls that fail are left out: torch tries some that may, and raises an error for others.
        options = ["--tool", tool, "--error-exitcode", str(ERROR_CODE), "--report-api-errors", "no"]
        words = ["compute-sanitizer", *options, *python(*PROGRAM, "sanitizer")]
        done = run_program(words, Deadline(time.remaining_seconds() / left), {**os.environ, **ENVIRONMENT})
        write_text(outcome.folder / f"{tool}.txt", "\n".join(done.said) + "\n")
        found = [line for line in done.said if line.startswith("=========")]
        outcome.say(*done.said[-1:])
        if done.code is None:
            outcome.ran_late(f"the end of {tool}; it was at {done.said[-1] if done.said else 'its start'}")
        elif not outcome.check(f"{tool} finds nothing in any kernel (exit code {done.code})", holds=done.code == 0):
            outcome.say(*(found or done.said))
