"""Runs a tool the way a user does: as a script, from the repository root; see `forked.py` for its start."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import forked
from harness.places import ROOT


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return forked.run(f"tools/{name}.py", *arguments)


def run_with_tools(*words: str) -> subprocess.CompletedProcess[str]:
    """What `python WORDS` does from the repository root, with the tools as modules."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def write_json_lines(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
