"""Programs that compare a library's kernels with the reference, each in a process of its own: a process loads one library only."""

from __future__ import annotations

import os
from pathlib import Path

from harness.forked import Forked
from harness.places import HARNESS


def compared(program: str, library: Path, *arguments: str, **environment: str) -> int:
    """How many results the program has found equal. environment: variables beside those of this process."""
    done = Forked(HARNESS / program, library, *arguments, environment={**os.environ, "PATH": "", **environment}).finished()
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
