"""The CUDA kernels compiled for the CPU: their sources as they are, against the stand-ins for CUDA's headers in cuda_on_cpu/."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from megatron_zpp.ops.build import SOURCES, Build, made_once

STAND_INS = Path(__file__).parent / "cuda_on_cpu"
# Misaligned wide accesses and overlong shifts end the process, as they would end a kernel or its result.
FLAGS = (
    "-std=c++20",
    "-O1",
    "-g0",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fsanitize=alignment,shift,bounds",
    "-fno-sanitize-recover=all",
    "-U_FORTIFY_SOURCE",  # its longjmp knows one stack only
)
ABI_FLAG = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"


def emulated_kernels() -> Path:
    """A library whose ops run the CUDA kernels on CPU tensors; compiled once, and kept beside the builds of the kernels."""
    csrc, stand_ins = (Build(folder, cuda_architectures=("emulated",)).key() for folder in (SOURCES, STAND_INS))
    library = Build().library().parents[1] / f"emulated-{csrc}-{stand_ins}" / "emulated.so"
    return made_once(library, _compile, lock_timeout_seconds=600)


def _compile(folder: Path) -> Path:
    includes = [f"-I{path}" for path in (STAND_INS, *include_paths())]
    libraries = [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch"]
    command = [os.environ.get("CXX", "c++"), *FLAGS, ABI_FLAG, "-x", "c++", *includes, str(STAND_INS / "emulation.cpp")]
    library = folder / "emulated.so"
    finished = subprocess.run([*command, *libraries, "-o", str(library)], capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(finished.stderr)
    return library
