"""Prints the table of a benchmark and writes it as JSON, with the machine, the settings and the command."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def report(
    program: str, arguments: Sequence[str], setting: Mapping[str, object], table: str, figures: Mapping[str, object], output: Path | None
) -> None:
    """Prints machine, setting, command and the table; writes them and the figures to `output`, if given."""
    command = " ".join([f"python benchmarks/{program}", *arguments])
    machine = {"processor": processor(), "cores": os.cpu_count(), **setting, "date": date.today().isoformat()}
    print(f"{', '.join(f'{name} {value}' for name, value in machine.items())}; `{command}`\n\n{table}")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"command": command, **machine, **figures}, indent=2) + "\n", encoding="utf-8")
