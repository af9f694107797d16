"""Describes the machine: GPU, driver, compilers and libraries."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess

from gpu.outcome import Outcome


def run() -> Outcome:
    import numpy
    import torch

    outcome = Outcome()
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "torch's CUDA": str(torch.version.cuda),
        "processor cores": str(os.cpu_count()),
        "nvcc": _first_line_with("release", [shutil.which("nvcc") or "nvcc", "--version"]),
        "driver": _first_line_with(".", ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]),
    }
    for name in ("safetensors", "sentencepiece", "ninja"):
        facts[name] = "there" if importlib.util.find_spec(name) or shutil.which(name) else "missing"
    if torch.cuda.is_available():
        facts |= _gpu_facts()
    outcome.measured = facts
    outcome.lines = [f"{name}: {fact}" for name, fact in facts.items()]
    return outcome


def _gpu_facts() -> dict[str, str]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "GPUs": str(torch.cuda.device_count()),
        "GPU": f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} multiprocessors",
        "GPU memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _first_line_with(text: str, command: list[str]) -> str:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return "missing"
    return next((line.strip() for line in finished.stdout.splitlines() if text in line), "no answer")
