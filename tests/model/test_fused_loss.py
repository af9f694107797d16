"""Head and loss on the CUDA kernels of the loss, with their grids emulated on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness.emulation import emulated_kernels
from harness.places import HARNESS, IMPORT_FROM

pytestmark = pytest.mark.compiles


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HARNESS / "fused_loss.py"), str(emulated_kernels()), *arguments]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, IMPORT_FROM)), "PATH": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_on_kernels_loss_and_gradients_are_those_of_torch_within_rounding_and_the_planned_peak_has_no_fp32_copies() -> None:
    finished = _run()
    assert (finished.returncode, finished.stdout) == (0, "4\n"), finished.stderr


def test_on_kernels_a_label_beyond_the_vocabulary_ends_the_run_and_says_why() -> None:
    finished = _run("50")
    assert finished.returncode != 0 and "a label is outside of the vocabulary" in finished.stderr
