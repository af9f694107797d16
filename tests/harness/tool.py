"""Runs a tool the way a user does: as a script, from the repository root; see `forked.py` for its start."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from harness import forked


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return forked.run(f"tools/{name}.py", *arguments)


def write_json_lines(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
