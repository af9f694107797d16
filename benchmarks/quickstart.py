"""Keeps what the quickstart left in runs/quickstart: losses, bytes, seconds and a sample, for the README's picture.

bash scripts/quickstart.sh --fresh
python -m benchmarks.quickstart --output benchmarks/results/quickstart.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import ROOT, report
from megatron_zpp.system.outside import OutsideFile

COMPARED = {"ZeRO-3": "compared_plain.jsonl", "ZeRO++": "compared_zeropp.jsonl", "lean": "compared_lean.jsonl"}
REMEDY = "run bash scripts/quickstart.sh --fresh."


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="quickstart.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "quickstart", help="what the quickstart wrote (default: runs/quickstart)"
    )
    parser.add_argument("--other-load", metavar="TEXT", help="what else the machine did meanwhile")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args(arguments)
    try:
        figures = figures_of(args.folder)
    except ValueError as error:
        parser.exit(2, f"quickstart.py: error: {error}\n")
    setting = {"measured": "bash scripts/quickstart.sh --fresh", "other_load": args.other_load or "none"}
    report("quickstart", arguments, setting, table(figures), figures, args.output)
    return 0


def figures_of(folder: Path) -> dict[str, Any]:
    """Everything that a quickstart left in its folder. Raises ValueError if a file of it is missing or unfinished.

    seconds: of the whole script, without the installation of packages.
    """
    run = run_of(folder / "log.jsonl")
    if not run["validation_losses"]:
        raise ValueError(f"{folder / 'log.jsonl'} holds no validation; {REMEDY}")
    statistics = _file(folder / "statistics.json")
    lines = statistics.content().splitlines() or [b""]
    unigram = statistics.members(lines[-1]).number("unigram_cross_entropy_nats")
    return {
        "seconds": _file(folder / "seconds.json").members().count("seconds"),
        "run": run,
        "compared": {name: run_of(folder / file) for name, file in COMPARED.items()},
        "token_frequencies_loss": unigram,
        "gain_nats": unigram - list(run["validation_losses"].values())[-1],
        "sample": _file(folder / "sample.txt").text(),
    }


def run_of(path: Path) -> dict[str, Any]:
    """The curves of one run, the bytes of its last step, and the median time of its lines but the first.

    path: of --log-jsonl, of a run that repeats no step.
    """
    file = _file(path)
    records = [file.members(line) for line in file.content().splitlines()]
    lines = [record for record in records if "lm_loss" in record]
    if not lines:
        raise ValueError(f"{path} holds no line of training; {REMEDY}")
    return {
        "losses": {line.count("iteration"): line.number("lm_loss") for line in lines},
        "validation_losses": {line.count("iteration"): line.number("validation_loss") for line in records if "validation_loss" in line},
        "inter_node_bytes": lines[-1].count("inter_node_bytes"),
        "intra_node_bytes": lines[-1].count("intra_node_bytes"),
        "step_ms": median(line.number("elapsed_ms_per_iteration") for line in lines[1:] or lines),
    }


def table(figures: Mapping[str, Any]) -> str:
    """The compared runs as Markdown."""
    lines = ["| run | MB per step into a node | into a rank in its node | step ms | last loss |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, run in figures["compared"].items():
        traffic = f"{run['inter_node_bytes'] / 1e6:.2f} | {run['intra_node_bytes'] / 1e6:.2f}"
        lines.append(f"| {name} | {traffic} | {run['step_ms']:.0f} | {list(run['losses'].values())[-1]:.4f} |")
    return "\n".join(lines)


def _file(path: Path) -> OutsideFile:
    return OutsideFile(path, str(path), REMEDY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
