"""How a test runs a program whose ranks are in network namespaces (testbed/network_ranks.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.places import importing
from testbed.sandbox import CannotIsolate, isolating_command


def found_by(module: str, folder: Path, *arguments: object, limit_seconds: float) -> Any:
    """The JSON that a program with a network of its own prints. Skips the test where a machine does not allow such a network."""
    try:
        isolating_command()
    except CannotIsolate as error:
        pytest.skip(str(error))
    finished = subprocess.run(
        [sys.executable, "-m", module, str(folder), *map(str, arguments)],
        env=importing(os.environ),
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)
