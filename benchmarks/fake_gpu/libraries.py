"""Compiles the libraries of fake GPUs, and makes the environment in which torch uses them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from megatron_zpp.ops.build import cache_folder, cuda_toolkit, made_once

FOLDER = Path(__file__).resolve().parent
CUDA_VERSION = "13."
NCCL_HEADERS = "include"  # in the package nvidia.nccl
DRIVER = "libcuda.so.1"


def fake_gpus(count: int, gibibytes: int, capability: str) -> dict[str, str]:
    """The variables with which a process has `count` fake GPUs. Compiles their libraries if need be.

    capability: such as "9.0". Raises ValueError if this torch is not built for CUDA 13, or if a compiler or headers are missing.
    """
    if torch.version.cuda is None or not torch.version.cuda.startswith(CUDA_VERSION):
        raise ValueError(
            f"torch {torch.__version__} is not built for CUDA 13, whose functions fake GPUs have; run this with the Python of an "
            "environment that has such a torch (pip install torch)."
        )
    runtime, driver = libraries()
    return {
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(driver.parent), os.environ.get("LD_LIBRARY_PATH")))),
        "FAKE_GPU_COUNT": str(count),
        "FAKE_GPU_MIB": str(gibibytes << 10),
        "FAKE_GPU_CAPABILITY": capability.replace(".", ""),
    }


def libraries() -> tuple[Path, Path]:
    """The compiled runtime and driver. Raises ValueError if they cannot be compiled."""
    nccl = find_spec("nvidia.nccl")
    if nccl is None or not nccl.submodule_search_locations:
        raise ValueError("the package nvidia-nccl-cu13, which torch with CUDA needs, is not installed; install it.")
    try:
        headers = [cuda_toolkit() / "include", Path(nccl.submodule_search_locations[0]) / NCCL_HEADERS]
        sources = {FOLDER / "runtime.cpp": "libfake_gpu.so", FOLDER / "driver.cpp": DRIVER}
        key = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + torch.__version__.encode()).hexdigest()[:16]
        folder = cache_folder(os.environ) / f"fake_gpu-{key}"
        runtime, driver = (made_once(folder / name, partial(_compiled, source, name, headers)) for source, name in sources.items())
    except RuntimeError as error:
        raise ValueError(f"the fake GPU cannot be compiled: {error}") from error
    return runtime, driver


def _compiled(source: Path, name: str, headers: list[Path], folder: Path) -> Path:
    compiler, made = os.environ.get("CXX") or "g++", folder / name
    if shutil.which(compiler) is None:
        raise RuntimeError(f"{compiler} is not found; install a C++ compiler, or name one in CXX.")
    included = [f"-I{header}" for header in headers]
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", *included, str(source), "-o", str(made)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(ended.stderr)
    return made
