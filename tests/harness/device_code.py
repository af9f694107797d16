"""What nvcc makes of the CUDA sources."""

from __future__ import annotations

import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path

from megatron_zpp.ops.build import SOURCES, Build, made_once


def ptx(source: str) -> str:
    """The PTX of csrc/`source`; compiled once, and kept beside the builds of the kernels."""
    folder = Build().library().parents[1] / f"ptx-{Build(cuda_architectures=('ptx',)).key()}-{_compiler()}"

    def compiled(folder: Path) -> Path:
        text = folder / "kernels.ptx"
        options = (SOURCES / "nvcc_options.txt").read_text().split()
        subprocess.run(["nvcc", *options, "-arch=sm_80", "-ptx", str(SOURCES / source), "-o", str(text)], check=True)
        return text

    return made_once(folder / f"{source.replace('/', '-')}.ptx", compiled, lock_timeout_seconds=600).read_text()


@cache
def _compiler() -> str:
    """8 hex digits that stand for the version of nvcc."""
    return sha256(subprocess.run(["nvcc", "--version"], capture_output=True, check=True).stdout).hexdigest()[:8]
