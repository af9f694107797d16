"""Keeps the numbers of gpu_half_hour.sh in one file, and prints them as tables. Needs no GPU.

    python -m benchmarks.gpu_table gpu_half_hour --output benchmarks/results/gpu_h100.json

Of speeds it keeps those of the training script (command 3), of a model of a billion parameters, and of every kernel (command 1).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernel_work
from benchmarks.gpu import script
from benchmarks.gpu.place import Place
from benchmarks.gpu.script import GIB, Speed
from benchmarks.gpu.training import MICROBATCHES, VARIANTS
from benchmarks.report import ROOT, command_of, write
from testbed.kernels.device_work import Work

COMMANDS = "1", "2", "3", "4"  # of gpu_half_hour.sh
MEGABYTES = 64  # of the values of the kernels that are kept
COUNTED = ROOT / "benchmarks" / "results" / "kernel_work.json"
DEFAULTS = "defaults"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where gpu_half_hour.sh has written the folders 1 to 4")
    parser.add_argument("--output", type=Path, help="JSON file to write the numbers to")
    args = parser.parse_args()
    found = kept([json.loads((args.folder / name / "gpu_check.json").read_text(encoding="utf-8")) for name in COMMANDS])
    print("\n\n".join((run_table(found), variant_table(found), kernel_table(found))))
    if args.output is not None:
        command = command_of("gpu_table", sys.argv[1:])
        write(args.output, {"command": command, **found})


def kept(checks: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of the JSON files of the commands."""
    parts = {name: part for check in reversed(checks) for name, part in check["parts"].items()}  # the first that had a part counts
    machine = checks[0]["machine"]
    records = parts["script"]["measured"]
    return {
        "machine": {
            "processor": machine["processor"],
            "cores": machine["cores"],
            "memory_gib": machine["memory_gibibytes"],
            **{name: machine[name] for name in ("gpu", "cuda", "nccl")},
        },
        "versions": {"python": machine["python"], "torch": machine["torch"]},
        "date": checks[0]["date"][:10],
        "sources": checks[0]["sources"],
        "parts": {name: {"status": part["status"], "seconds": part["seconds"]} for name, part in parts.items()},
        "runs": [_run(some, records[some.name]) for some in script.RUNS if some.ranks == 1 and not some.is_profiled],
        "step": _steps(parts["training"]["measured"]),
        "seconds_by_kind": parts["training"]["measured"]["seconds_by_kind"],
        "beside_allocator_bytes": parts["training"]["measured"]["used_bytes"] - parts["training"]["measured"]["reserved_bytes"],
        "kernels": [one for one in parts["speed"]["measured"]["kernels"] if one["megabytes"] == MEGABYTES],
        "host_link_bytes_per_second": parts["offload"]["measured"]["rates"],
    }


def _run(some: script.Run, records: list[dict[str, Any]]) -> dict[str, Any]:
    words = some.words(Place(torch.device("cuda", 0), is_tiny=False), Path("."))
    planned = script.planned_bytes(words, some.ranks, is_on_gpu=True)
    return {"name": some.name, "speed": asdict(Speed.of(records)), "planned_bytes": planned}


def _steps(training: dict[str, Any]) -> list[dict[str, Any]]:
    """Milliseconds, MFU and share of the rate of large products, of a billion parameters, by variant and number of micro-batches."""
    return [
        {
            "variant": variant,
            "microbatches": microbatches,
            "ms": 1e3 * statistics.median(measured["step_seconds"]),
            "mfu": measured["mfu"],
            "of_products": measured["mfu_of_products"],
        }
        for variant in (DEFAULTS, *(some.name for some in VARIANTS))
        for microbatches, name in ((1, "1 micro-batch"), (MICROBATCHES, f"{MICROBATCHES} micro-batches"))
        for measured in [training[name if variant == DEFAULTS else f"{name}, {variant}"]]
    ]


def run_table(found: dict[str, Any]) -> str:
    rows = ["| run | ms per step | tokens/s | MFU, % | peak, GiB | plan, GiB |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for one in found["runs"]:
        speed = Speed(**one["speed"])
        mfu = "" if speed.mfu is None else f"{100 * speed.mfu:.1f}"
        memory = f"{speed.peak_bytes / GIB:.2f} | {one['planned_bytes'] / GIB:.2f}"
        rows.append(f"| {one['name']} | {speed.step_ms:.1f} | {speed.tokens_per_second:,.0f} | {mfu} | {memory} |")
    return "\n".join(rows)


def variant_table(found: dict[str, Any]) -> str:
    rows = ["| 1.0 billion parameters | micro-batches | ms per step | MFU, % |", "| --- | ---: | ---: | ---: |"]
    rows += [f"| {one['variant']} | {one['microbatches']} | {one['ms']:.1f} | {100 * one['mfu']:.1f} |" for one in found["step"]]
    return "\n".join(rows)


def kernel_table(found: dict[str, Any]) -> str:
    """What kernel_work.py has counted, and beside it the share of a copy's rate."""
    shares = {(one["codes"], one["op"]): one["share_of_copy"] for one in found["kernels"]}
    calls = [Work(**one) for one in json.loads(COUNTED.read_text(encoding="utf-8"))["calls"]]
    cells = ["H100: of a copy, %", "---:", *(f"{100 * shares[call.codes, call.name]:.0f}" for call in calls)]
    return "\n".join(f"{line} {cell} |" for line, cell in zip(kernel_work.table(calls).splitlines(), cells, strict=True))


if __name__ == "__main__":
    main()
