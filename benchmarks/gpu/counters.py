"""Reads the hardware counters of every kernel with ncu: how busy memory and the units of arithmetic are."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable

from benchmarks.gpu.commands import python, require_program, run_program
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.kernel_program import BLOCK_NUMEL, PROGRAM, RUN_NUMEL, own_ops
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place, require_gpu, require_kernels

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "LaunchStats")
WRITE_SECONDS = 40.0  # of the time; ncu starts torch, and writes everything when the program has ended
MOST_ERRORS = 10  # of ncu, that are said
METRICS = ("Duration", "DRAM Throughput", "Compute (SM) Throughput", "Registers Per Thread")


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    require_gpu(place)
    require_kernels(place)
    require_program("ncu")
    file = outcome.folder / "ncu.csv"
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "details", "--log-file", str(file)]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    seconds = f"{time.remaining_seconds() - WRITE_SECONDS:.0f}"
    done = run_program(["ncu", *options, *sections, *python(*PROGRAM, "counters", seconds)], time, os.environ)
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    rows = table(lines)
    outcome.say(*[line for line in lines if line.startswith("==ERROR==")][:MOST_ERRORS])
    if len(rows) == len(done.said):  # each call starts one kernel
        outcome.say(*(f"{call}: {row}" for call, row in zip(done.said, rows, strict=True)))
    else:
        outcome.say(*rows, "the calls, in their order:", *done.said)
    outcome.say(f"everything is in {file.name}")
    if done.code is None:
        outcome.ran_late("the end of ncu")
        return
    if done.code == 0 and (missing := sum(1 for _ in own_ops(RUN_NUMEL, BLOCK_NUMEL)) - len(done.said)):
        outcome.ran_late(f"the last {missing} calls")
    outcome.check(f"ncu has counted {len(rows)} kernels (exit code {done.code})", holds=done.code == 0 and bool(rows))


def table(lines: Iterable[str]) -> list[str]:
    """A line per kernel, in the order of their launches, with METRICS. lines: of the CSV of ncu, with its messages."""
    by_kernel: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        kernel = by_kernel.setdefault(row.get("ID") or "", {"name": (row.get("Kernel Name") or "")[:60]})
        if row.get("Metric Name") in METRICS:
            kernel[row["Metric Name"]] = f"{row.get('Metric Value')} {row.get('Metric Unit')}"
    return [", ".join([found["name"], *(f"{name} {found[name]}" for name in METRICS if name in found)]) for found in by_kernel.values()]
