"""Runs programs of this repository from its root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.outcome import NotDone
from benchmarks.report import ROOT


@dataclass(frozen=True)
class Done:
    """code: None if the program was killed because its time was over. said: everything that it printed."""

    code: int | None
    said: list[str]


def run_program(words: list[str], time: Deadline, environment: Mapping[str, str] = os.environ) -> Done:
    """Runs the program until it ends or the time is over. Then those that it has started are killed, too."""
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=os.setpgrp,  # a group in the session of the part, whose end is the end of all
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, time.remaining_seconds()))
        code: int | None = process.returncode
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        said, code = error.stdout or b"", None
    return Done(code, said.decode(errors="replace").strip().splitlines())


def require_program(name: str) -> None:
    """Raises NotDone if a program of CUDA's toolkit is not found."""
    if shutil.which(name) is None:
        raise NotDone(f"{name} is not on PATH; it is in the folder bin of CUDA's toolkit")


def python(*words: str) -> list[str]:
    return [sys.executable, *words]
