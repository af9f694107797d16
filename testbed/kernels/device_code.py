"""What nvcc makes of the CUDA sources."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

from megatron_zpp.ops.build import SOURCES, Build, made_once
from testbed.kernels.device_work import Work
from testbed.kernels.emulation import emulated_kernels
from testbed.kernels.ptx_machine.launches import symbols_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES_OF_KERNELS = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cu"))


def ptx(source: str, architecture: str = "sm_80") -> Path:
    """A file with the PTX of csrc/`source`; compiled once, and kept beside the builds of the kernels."""

    def compiled(folder: Path) -> Path:
        text = folder / "kernels.ptx"
        options = (SOURCES / "nvcc_options.txt").read_text().split()
        subprocess.run(["nvcc", *options, f"-arch={architecture}", "-ptx", str(SOURCES / source), "-o", str(text)], check=True)
        return text

    return made_once(_folder() / f"{source.replace('/', '-')}-{architecture}.ptx", compiled, lock_timeout_seconds=600)


def work_on_ptx(slices: int, row_numel: int, block_numel: int) -> list[Work]:
    """What every timed call does on ptx_machine/ with values of this size; see device_work.py. It is a process that loads the library.

    Raises RuntimeError with what the process has written if it fails.
    """
    words = map(str, (symbols(), emulated_kernels(), slices, row_numel, block_numel))
    done = subprocess.run(
        [sys.executable, "-m", "testbed.kernels.device_work", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return [Work(**each) for each in json.loads(done.stdout)]


def symbols() -> Path:
    """A file that says which PTX is that of each kernel of the emulated library."""
    library = emulated_kernels()
    modules = [ptx(source) for source in SOURCES_OF_KERNELS]

    def written(folder: Path) -> Path:
        symbols_of(library, modules, folder / "symbols")
        return folder / "symbols"

    return made_once(_folder() / f"symbols-{library.parent.name}.json", written, lock_timeout_seconds=600)


def _folder() -> Path:
    compiler = sha256(nvcc_version().encode()).hexdigest()[:8]
    return Build().library().parents[1] / f"ptx-{Build(cuda_architectures=('ptx',)).key()}-{compiler}"


@cache
def nvcc_version() -> str:
    """What nvcc prints of itself."""
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
