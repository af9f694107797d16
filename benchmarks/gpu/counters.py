"""Reads the hardware counters of every kernel with ncu: how busy memory and the units of arithmetic are."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence

from gpu.commands import ROOT, python, require_program, run_program
from gpu.deadline import Deadline
from gpu.outcome import Outcome
from gpu.place import Place, require_gpu, require_kernels

PROGRAM = str(ROOT / "benchmarks" / "gpu" / "kernel_program.py")
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "LaunchStats")
METRICS = ("Duration", "DRAM Throughput", "Compute (SM) Throughput", "Registers Per Thread")
LONGEST_NAME = 60


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    require_gpu(place)
    require_kernels(place)
    require_program("ncu")
    file = outcome.folder / "ncu.csv"
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "details", "--log-file", str(file)]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    done = run_program(["ncu", *options, *sections, *python(PROGRAM, "counters")], time, os.environ)
    kernels = table(file.read_text(errors="replace").splitlines() if file.is_file() else [])
    outcome.say(*in_words(kernels, done.said), f"everything is in {file.name}")
    if done.code is None:
        outcome.ran_late("the end of ncu")
        return
    outcome.check(f"ncu has counted {len(kernels)} kernels (exit code {done.code})", holds=done.code == 0 and bool(kernels))


def table(lines: Iterable[str]) -> list[tuple[str, str]]:
    """The name of each kernel, in the order of their launches, and METRICS. lines: of the CSV of ncu, with its messages."""
    by_launch: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        kernel = by_launch.setdefault(row.get("ID") or "", {"name": row.get("Kernel Name") or ""})
        if row.get("Metric Name") in METRICS:
            kernel[row["Metric Name"]] = f"{row.get('Metric Value')} {row.get('Metric Unit')}"
    return [(found["name"], ", ".join(f"{name} {found[name]}" for name in METRICS if name in found)) for found in by_launch.values()]


def in_words(kernels: Sequence[tuple[str, str]], said: Sequence[str]) -> list[str]:
    """A line per kernel. said: what the program has printed, which is a line per call if each call has launched one kernel."""
    if len(said) == len(kernels):
        return [f"{call}: {metrics}" for call, (_, metrics) in zip(said, kernels, strict=True)]
    return [*(f"{name[:LONGEST_NAME]}: {metrics}" for name, metrics in kernels), "the program has printed:", *said]
