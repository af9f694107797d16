"""Compiles every CUDA source by itself, for two architectures, with warnings as errors."""

from __future__ import annotations

import time as clock

from benchmarks.gpu.commands import require_program, run_program
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.outcome import Outcome


def run(time: Deadline, outcome: Outcome) -> None:
    require_program("nvcc")
    start = clock.monotonic()
    done = run_program(["bash", "scripts/compile_cuda.sh"], time)
    outcome.measure(seconds=round(clock.monotonic() - start, 1))
    if done.code is None:
        outcome.ran_late("the end of the compilation")
        return
    outcome.check("every .cu compiles for sm_80 and sm_90 without a warning", holds=done.code == 0)
    outcome.say(*([done.said[-1]] if done.code == 0 and done.said else done.said))
