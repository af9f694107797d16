"""Measures what grows with the number of ranks.

    python -m benchmarks.scale control groups joining reports store real-ranks --output benchmarks/results/scale.json

control: bytes of a gather of numbers that enter a node, on nodes that are network namespaces. groups: the process groups of a rank, with
torch's fake groups. joining: operations of the store of members that are threads, one of which comes late. reports: of a rank that
reports a failure. store: what groups of gloo ask of it and take of memory, and how much it answers. real-ranks: memory of the host of
real ranks of the training script. Each part that is measured replaces the stored one. Needs root or user namespaces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import in_table, machine_text, origin, origin_with, write
from benchmarks.scale_study import control, groups, members, real_ranks, reports, store
from megatron_zpp.parallel.gathers import rounds
from testbed.sandbox import enter_own_network

PARTS: dict[str, Callable[[], Sequence[Any]]] = {
    "control": control.measure,
    "groups": groups.measure,
    "joining": members.measure,
    "reports": reports.measure,
    "store": store.measure,
    "real-ranks": real_ranks.measure,
}
LARGE = (512, 8), (2048, 8)  # nodes, ranks per node


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scale.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write, or to add to")
    options = parser.parse_args(arguments)
    enter_own_network(["-m", "benchmarks.scale", *arguments])
    for part in options.parts:
        rows = [asdict(row) for row in PARTS[part]()]
        stored = json.loads(options.output.read_text()) if options.output.exists() else {}
        results = {**stored, **origin_with(stored, origin("scale", arguments)), part: rows}
        write(options.output, results)
        print(f"{machine_text(results)}\n\n{TABLES[part](results)}\n", flush=True)
    return 0


def control_table(results: Mapping[str, Any]) -> str:
    """Measured worlds, then large ones by the ledger alone."""
    measured = [control.Control(**row) for row in results["control"]]
    rows = [
        [f"{row.nodes} x {row.ranks_per_node}", f"{row.rounds}", f"{row.payload}", f"{row.levels:.0f}", f"{row.ring:.0f}"]
        for row in measured
    ]
    for nodes, ranks in LARGE:
        rows.append([f"{nodes} x {ranks}", str(rounds(nodes)), str(control.payload_into_node(nodes, ranks)), "", ""])
    return in_table(["nodes x ranks", "rounds", "payload", "on the link", "one ring of all ranks"], rows)


def groups_table(results: Mapping[str, Any]) -> str:
    rows = [groups.Groups(**row) for row in results["groups"]]
    return in_table(
        ["ranks", "groups of all ranks", "of one rank", "seconds"],
        [[str(row.ranks), str(row.made), str(row.own), f"{row.seconds:.3f}"] for row in rows],
        words=0,
    )


def joining_table(results: Mapping[str, Any]) -> str:
    rows = [members.Joining(**row) for row in results["joining"]]
    return in_table(
        ["members", "s late", "of a member", "of rank 0", "per second of a member that waits"],
        [
            [f"{row.members}", f"{row.late_seconds:.0f}", f"{row.of_member:.0f}", f"{row.of_rank_0}", f"{row.per_second:.1f}"]
            for row in rows
        ],
        words=0,
    )


def reports_table(results: Mapping[str, Any]) -> str:
    rows = [reports.Report(**row) for row in results["reports"]]
    return in_table(
        ["ranks", "operations", "seconds"], [[str(row.ranks), str(row.operations), f"{row.seconds:.1f}"] for row in rows], words=0
    )


def store_table(results: Mapping[str, Any]) -> str:
    row = results["store"][0]
    costs = [(ranks, store.Cost(**row["all_ranks"][ranks]), store.Cost(**row["texts"][ranks])) for ranks in row["texts"]]
    lines = [[ranks, str(whole.operations), f"{whole.mib:.2f}", str(texts.operations), f"{texts.mib:.2f}"] for ranks, whole, texts in costs]
    lines.append(["the store answers per second", f"{row['per_second']:.0f}", "", "", ""])
    return in_table(["ranks", "operations, one group of all", "MiB", "operations, groups for texts", "MiB"], lines)


def real_ranks_table(results: Mapping[str, Any]) -> str:
    rows = [real_ranks.RealRanks(**row) for row in results["real-ranks"]]
    lines = [[str(row.ranks), f"{row.peak_mib:.1f}", f"{row.seconds:.0f}"] for row in rows]
    lines.append(["for each more", f"{real_ranks.mib_per_peer(rows):.3f}", ""])
    return in_table(["ranks", "most memory of a rank, MiB", "seconds of the run"], lines, words=0)


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "control": control_table,
    "groups": groups_table,
    "joining": joining_table,
    "reports": reports_table,
    "store": store_table,
    "real-ranks": real_ranks_table,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
