"""Builds the library of kernels that torch loads, and loads it in a new process."""

from __future__ import annotations

import time as clock

import torch

from gpu.commands import python, run_program
from gpu.deadline import Deadline
from gpu.outcome import Outcome

LOADS = (
    "from megatron_zpp.ops import extension as e; e.load(); print(e.report('{device}')); print('kernels:', e.has_kernels_for('{device}'))"
)


def run(time: Deadline, outcome: Outcome) -> None:
    start = clock.monotonic()
    built = run_program(python("-m", "megatron_zpp.ops.extension"), time)
    outcome.measure(build_seconds=round(clock.monotonic() - start, 1))
    outcome.say(*built.said)
    if built.code is None:
        outcome.ran_late("the end of the build")
        return
    if not outcome.check("the library of kernels builds", holds=built.code == 0):
        return
    device = "cpu" if torch.version.cuda is None else "cuda"
    if device == "cpu":
        outcome.omit(f"CUDA bodies in the library: torch {torch.__version__} has no CUDA")
    loaded = run_program(python("-c", LOADS.format(device=device)), time)
    outcome.say(*loaded.said)
    outcome.check(f"a new process loads its bodies for {device}", holds=loaded.said[-1:] == ["kernels: True"])
