"""Compiles every CUDA source and expects no warning, then builds the library that torch loads."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from gpu.outcome import NotDone, Outcome

ROOT = Path(__file__).resolve().parents[2]


def run() -> Outcome:
    import torch

    outcome = Outcome()
    _compile_alone(outcome)
    start = time.monotonic()
    build = [sys.executable, "-m", "megatron_zpp.ops.extension"]
    finished = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    outcome.measured["library_seconds"] = round(time.monotonic() - start, 1)
    outcome.check("the library of kernels builds", holds=finished.returncode == 0)
    outcome.lines += (finished.stdout + finished.stderr)[-3000:].strip().splitlines()
    if torch.version.cuda is None:
        outcome.omissions.append(f"CUDA bodies in the library: torch {torch.__version__} has no CUDA")
    elif finished.returncode == 0:
        outcome.check("the library has CUDA bodies", holds=_loads_cuda_bodies())
    return outcome


def _compile_alone(outcome: Outcome) -> None:
    if shutil.which("nvcc") is None:
        outcome.omissions.append("compiling every .cu on its own: nvcc is not on PATH")
        return
    start = time.monotonic()
    finished = subprocess.run(["bash", "scripts/compile_cuda.sh"], cwd=ROOT, capture_output=True, text=True, check=False)
    outcome.measured["compile_cuda_seconds"] = round(time.monotonic() - start, 1)
    outcome.check("every .cu compiles for sm_80 and sm_90 without a warning", holds=finished.returncode == 0)
    outcome.lines += finished.stdout.splitlines() + finished.stderr.splitlines()[:40]


def _loads_cuda_bodies() -> bool:
    program = "from megatron_zpp.ops import extension as e; print(e.load() and e.has_kernels_for('cuda'))"
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    return finished.stdout.strip() == "True"


def require_kernels(device_type: str) -> None:
    """Loads the kernels for this type of device, or raises NotDone."""
    from megatron_zpp.ops import extension

    extension.load()
    if not extension.has_kernels_for(device_type):
        raise NotDone(f"no kernels for {device_type} are built; {extension.BUILD_COMMAND} builds them")
