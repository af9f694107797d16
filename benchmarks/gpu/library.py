"""Builds the library of kernels that torch loads, and loads it in a new process."""

from __future__ import annotations

import os
import time as clock
from collections.abc import Mapping

import torch

from benchmarks.gpu.commands import python, run_program
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.outcome import Outcome

LOADS = (
    "from megatron_zpp.ops import extension as e; e.load(); print(e.report('{device}')); print('kernels:', e.has_kernels_for('{device}'))"
)
FIRST_ERRORS = 20  # lines that are said first


def run(time: Deadline, outcome: Outcome) -> None:
    start = clock.monotonic()
    built = run_program(python("-m", "megatron_zpp.ops.extension"), time)
    outcome.measure(build_seconds=round(clock.monotonic() - start, 1))
    if built.code == 0:
        outcome.say(*built.said[-1:])
    else:  # an error of a compiler may stand anywhere
        errors = [line for line in built.said if "error" in line.lower()]
        outcome.say(*errors[:FIRST_ERRORS], "the whole output of the build:", *built.said)
    if built.code is None:
        outcome.ran_late("the end of the build")
        return
    if not outcome.check("the library of kernels builds", holds=built.code == 0):
        return
    device = "cpu" if torch.version.cuda is None else "cuda"
    if device == "cpu":
        outcome.omit(f"CUDA bodies in the library: torch {torch.__version__} has no CUDA")
    check_loads(time, outcome, "a new process", device)


def check_loads(time: Deadline, outcome: Outcome, who: str, device: str, environment: Mapping[str, str] = os.environ) -> None:
    """Checks that a process with this environment loads the bodies for `device`."""
    loaded = run_program(python("-c", LOADS.format(device=device)), time, environment)
    outcome.say(*loaded.said)
    if loaded.code is None:
        outcome.ran_late(f"{who} that loads the library")
        return
    outcome.check(f"{who} loads its bodies for {device}", holds=loaded.said[-1:] == ["kernels: True"])
