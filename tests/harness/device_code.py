"""What nvcc makes of the CUDA sources."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path

from harness.device_work import Work
from harness.emulation import emulated_kernels
from harness.forked import Forked
from harness.places import HARNESS
from harness.ptx_machine.launches import symbols_of
from megatron_zpp.ops.build import SOURCES, Build, made_once

SOURCES_OF_KERNELS = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cu"))


def ptx(source: str, architecture: str = "sm_80") -> Path:
    """A file with the PTX of csrc/`source`; compiled once, and kept beside the builds of the kernels."""

    def compiled(folder: Path) -> Path:
        text = folder / "kernels.ptx"
        options = (SOURCES / "nvcc_options.txt").read_text().split()
        subprocess.run(["nvcc", *options, f"-arch={architecture}", "-ptx", str(SOURCES / source), "-o", str(text)], check=True)
        return text

    return made_once(_folder() / f"{source.replace('/', '-')}-{architecture}.ptx", compiled, lock_timeout_seconds=600)


def compared_on_ptx(program: str, *arguments: str, without: str | None = None) -> tuple[int, int]:
    """How many results a program of harness/ has found equal, and how many kernels it has launched, on ptx_machine/.

    without: a statement that the PTX is left without. Raises AssertionError with what the program has written if it fails.
    """
    options = () if without is None else ("--without", without)
    done = Forked(HARNESS / "ptx_machine/launches.py", *options, _symbols(), program, emulated_kernels(), *arguments).finished()
    assert done.returncode == 0, done.stderr
    results, kernels = map(int, done.stdout.split())
    return results, kernels


def work_on_ptx(slices: int, row_numel: int, block_numel: int) -> list[Work]:
    """What every timed call of benchmarks/gpu/ does there on values of this size; see device_work.py."""
    done = Forked(HARNESS / "device_work.py", _symbols(), emulated_kernels(), slices, row_numel, block_numel).finished()
    assert done.returncode == 0, done.stderr
    return [Work(**each) for each in json.loads(done.stdout)]


def _symbols() -> Path:
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
