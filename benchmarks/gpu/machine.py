"""Describes the machine: GPU, driver, compilers and libraries."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import warnings

from gpu.deadline import Deadline
from gpu.outcome import Outcome


def run(time: Deadline, outcome: Outcome) -> None:
    outcome.measure(
        python=platform.python_version(),
        cores=os.cpu_count(),
        nvcc=_first_line_with("release", [shutil.which("nvcc") or "nvcc", "--version"]),
        driver=_first_line_with(".", ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]),
        packages={
            name: "there" if _is_there(name) else "missing" for name in ("safetensors", "sentencepiece", "ninja", "setuptools", "triton")
        },
    )
    import numpy
    import torch

    outcome.measure(torch=torch.__version__, numpy=numpy.__version__, cuda=str(torch.version.cuda))
    with warnings.catch_warnings(record=True) as caught:  # torch says there why it finds no GPU, for example if the driver is too old
        warnings.simplefilter("always")
        has_gpu = torch.cuda.is_available()
    if has_gpu:
        properties = torch.cuda.get_device_properties(0)
        outcome.measure(
            gpus=torch.cuda.device_count(),
            gpu=properties.name,
            architecture=f"sm_{properties.major}{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            gpu_gibibytes=round(properties.total_memory / 2**30, 1),
            free_gibibytes=round(torch.cuda.mem_get_info()[0] / 2**30, 1),
            nccl=".".join(map(str, torch.cuda.nccl.version())),
            cudnn=torch.backends.cudnn.version(),
        )
    else:
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        why = "".join(f"; {one.message}" for one in caught)
        outcome.omit(f"everything on a GPU: torch finds none here (torch {torch.__version__} is built for {built_for}{why})")
    outcome.say(*(f"{name}: {fact}" for name, fact in outcome.measured.items()))


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None or shutil.which(name) is not None


def _first_line_with(text: str, command: list[str]) -> str:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "missing"
    return next((line.strip() for line in finished.stdout.splitlines() if text in line), "no answer")
