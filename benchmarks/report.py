"""Prints the table of a benchmark and writes it as JSON. Every file of results says how it was made, in the same words."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ORIGIN = ("command", "machine", "versions", "date")
SEPARATOR = " or "  # of processors, where results are from several machines


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def command_of(module: str, arguments: Sequence[str]) -> str:
    """How a module of benchmarks/ is run from the root of the checkout."""
    return shlex.join(["python", "-m", f"benchmarks.{module}", *arguments])


def origin(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """How results of a module of benchmarks/ are made: command, machine, versions and date."""
    package = re.search(r'^__version__ = "(.+)"$', (ROOT / "megatron_zpp" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "command": command_of(module, arguments),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "memory_gib": _memory_gib()},
        "versions": {"python": platform.python_version(), "torch": version("torch"), "megatron_zpp": package[1] if package else "unknown"},
        "date": date.today().isoformat(),
    }


def origin_with(stored: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The origin of results to which another command adds: all commands and processors, and the rest of `own`.

    stored: results with an origin, or none.
    """
    together = list(dict.fromkeys([*commands_of(stored), *commands_of(own)]))
    processors = dict.fromkeys([*_processors_of(stored), *_processors_of(own)])
    machine = {**own["machine"], "processor": SEPARATOR.join(processors)}
    return {**own, "command": together[0] if len(together) == 1 else together, "machine": machine}


def commands_of(results: Mapping[str, Any]) -> list[str]:
    """The commands that made results; none of results without an origin."""
    commands = results.get("command", [])
    return [commands] if isinstance(commands, str) else list(commands)


def _processors_of(results: Mapping[str, Any]) -> list[str]:
    """The processors of the machines that made results."""
    return str(results["machine"]["processor"]).split(SEPARATOR) if "machine" in results else []


def machine_text(results: Mapping[str, Any]) -> str:
    """Machine, versions and date of results as one line; what is not known is left out."""
    machine, versions = results.get("machine", {}), results.get("versions", {})
    facts = [machine.get("processor"), f"{machine['cores']} cores" if "cores" in machine else None]
    facts += [f"{machine['memory_gib']} GiB" if "memory_gib" in machine else None, *(f"{name} {found}" for name, found in versions.items())]
    return ", ".join(filter(None, [*facts, results.get("date")]))


def in_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A Markdown table. words: columns before those of numbers, which are aligned on the right."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


def report(
    module: str, arguments: Sequence[str], setting: Mapping[str, object], table: str, figures: Mapping[str, object], output: Path | None
) -> None:
    """Prints origin, setting and the table; writes origin, setting and figures to `output`, if given."""
    made = origin(module, arguments)
    print(f"{', '.join([machine_text(made), *(f'{name} {value}' for name, value in setting.items())])}; `{made['command']}`\n\n{table}")
    if output is not None:
        write(output, {**made, **setting, **figures})


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Writes results whole: an interrupted program leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
