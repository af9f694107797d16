"""Eight processes build the library at once, without ninja, with a list of architectures such as containers set; one of them compiles."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time as clock
from pathlib import Path

import torch

from benchmarks.gpu.commands import python
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.library import check_loads
from benchmarks.gpu.outcome import Outcome
from benchmarks.report import ROOT

AT_ONCE = 8
TOO_OLD = "7.0 7.5"


def run(time: Deadline, outcome: Outcome) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {
            **os.environ,
            "TORCH_EXTENSIONS_DIR": str(folder / "builds"),
            "PATH": f"{_with_broken_ninja(folder / 'bin')}{os.pathsep}{os.environ['PATH']}",
        }
        has_cuda = torch.version.cuda is not None and torch.cuda.is_available()
        if has_cuda:
            major, minor = torch.cuda.get_device_capability(0)
            environment["TORCH_CUDA_ARCH_LIST"] = f"{TOO_OLD} {major}.{minor}+PTX"
        else:
            outcome.omit("TORCH_CUDA_ARCH_LIST of a container: torch finds no GPU here")
        _build(time, outcome, environment, folder, has_cuda=has_cuda)


def _with_broken_ninja(folder: Path) -> Path:
    """`folder`, made with a ninja that always fails, so that torch builds without it."""
    folder.mkdir()
    (folder / "ninja").write_text("#!/bin/sh\nexit 1\n")
    (folder / "ninja").chmod(0o755)
    return folder


def _build(time: Deadline, outcome: Outcome, environment: dict[str, str], folder: Path, *, has_cuda: bool) -> None:
    start = clock.monotonic()
    logs = [folder / f"{number}.txt" for number in range(AT_ONCE)]
    processes = []
    for log in logs:
        with log.open("wb") as file:
            command = python("-m", "megatron_zpp.ops.extension")
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT))
    while any(process.poll() is None for process in processes) and time.has(5.0):
        clock.sleep(0.2)
    codes = [process.poll() for process in processes]
    outcome.measure(build_seconds=round(clock.monotonic() - start, 1), exit_codes=codes)
    if None in codes:
        outcome.ran_late(f"the end of {AT_ONCE} builds at once, without ninja")
        return
    said = [log.read_text(errors="replace") for log in logs]
    if not outcome.check(f"{AT_ONCE} builds at once, without ninja, succeed", holds=codes == [0] * AT_ONCE):
        outcome.say(*said[next(index for index, code in enumerate(codes) if code)].splitlines())
        return
    libraries = list((folder / "builds").rglob("*.so"))
    outcome.check(f"they make one library: {[library.name for library in libraries]}", holds=len(libraries) == 1)
    if has_cuda:
        outcome.check("each says which architectures it leaves out", holds=all("Without code for 7.0, 7.5" in text for text in said))
    device = "cuda" if has_cuda else "cpu"
    check_loads(time, outcome, "a process with the same list", device, environment)
