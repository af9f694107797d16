"""Programs that compare a library's kernels with the reference, each in a process of its own: a process loads one library only."""

from __future__ import annotations

import os
from pathlib import Path

from harness.forked import Forked
from harness.places import HARNESS, ROOT
from testbed.kernels.device_code import symbols
from testbed.kernels.emulation import emulated_kernels

KERNELS = ROOT / "testbed" / "kernels"


def compared(program: str, library: Path, *arguments: str, **environment: str) -> int:
    """How many results the program has found equal. environment: variables beside those of this process."""
    done = Forked(_path(program), library, *arguments, environment={**os.environ, "PATH": "", **environment}).finished()
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def compared_on_ptx(program: str, *arguments: str, without: str | None = None) -> tuple[int, int]:
    """How many results the program has found equal, and how many kernels it has launched, on what nvcc makes of them (ptx_machine/).

    without: a statement that the PTX is left without. Raises AssertionError with what the program has written if it fails.
    """
    options = () if without is None else ("--without", without)
    launches = KERNELS / "ptx_machine" / "launches.py"
    done = Forked(launches, *options, symbols(), _path(program), emulated_kernels(), *arguments).finished()
    assert done.returncode == 0, done.stderr
    results, kernels = map(int, done.stdout.split())
    return results, kernels


def _path(program: str) -> Path:
    """Those that GPUs run, too, are in testbed/kernels/."""
    return next(path for folder in (KERNELS, HARNESS) if (path := folder / program).exists())
