"""Rehearses the first half hour on a GPU, on a fake GPU, where torch is built for CUDA 13."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.places import ROOT

from benchmarks.gpu.runner import FAILED_CODE, LATE_CODE, PASSED_CODE
from megatron_zpp.ops.build import has_nvcc

# What a fake GPU cannot do: cuDNN's attention, and ranks that wait for each other.
CANNOT = ("--attention-backend fused", "lost_rank: ")
ENDS_BADLY = re.compile(r"does not end with|and not with|ends well|the part died|Error")


@pytest.mark.long
@pytest.mark.gloo
@pytest.mark.skipif(
    not (torch.version.cuda or "").startswith("13.") or not has_nvcc(), reason="fake GPUs need torch built for CUDA 13, and nvcc"
)
@pytest.mark.parametrize("number", ["1", "2", "3", "4"])
def test_a_command_of_the_half_hour_runs_on_fake_gpus_to_its_end(number: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.fake_gpus", "bash", "benchmarks/gpu_half_hour.sh", number]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode in (PASSED_CODE, FAILED_CODE, LATE_CODE) and len(done.stdout + done.stderr) < 12_000, done.stdout + done.stderr
    summary = json.loads((tmp_path / number / "gpu_check.json").read_text())
    failures = [f"{name}: {failure}" for name, found in summary["parts"].items() for failure in found["failures"]]
    assert [failure for failure in failures if ENDS_BADLY.search(failure) and not any(cannot in failure for cannot in CANNOT)] == []
    assert summary["unfinished"] == [] and summary["parts"]["library"]["status"] == "passed"
    assert done.stdout.splitlines()[-1].startswith(f"command {number}: exit code {done.returncode} after")
