"""Measures how long a save takes that also copies its files to the other node, over links of limited rate.

    python -m benchmarks.save_copies --output benchmarks/results/save_copies.json

Two nodes of two ranks are network namespaces, and each saves in a folder of its own after every step. Each rate has one run without copies
and one with them. Seconds are those that a run logs for a save that it waits for, medians without the first one. "copies" is the difference
of both runs, beside what a plan says: the bytes that come into a node, divided by the rate. Needs root or user namespaces.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import ROOT, in_table, report
from testbed.network import Network
from testbed.network_ranks import printed_by_ranks
from testbed.rates import Rate
from testbed.sandbox import enter_own_network

NODES, RANKS_PER_NODE = 2, 2
LATENCY = re.compile(r"Latency\(second\): ([\d.]+)")
MODEL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 4 --seq-length 64 --vocab-size 1000 --mock-data --micro-batch-size 1 "
    "--global-batch-size 4 --zero-stage 1 --distributed-backend gloo --num-workers 0 --eval-iters 0"
)
LONGEST_SECONDS = 1800.0


@dataclass(frozen=True)
class Result:
    """Seconds of a save at a rate. planned: of the copies. node_bytes: that the copies bring into a node."""

    rate: str
    node_bytes: int
    without: float
    with_copies: float
    planned: float | None

    @property
    def copies(self) -> float:
        return self.with_copies - self.without


def main() -> None:
    options = _parser().parse_args()
    enter_own_network(["-m", "benchmarks.save_copies", *sys.argv[1:]])
    network = Network(NODES)
    results = [measured(network, rate, options.saves, port) for port, rate in zip(range(29500, 29900, 2), options.rate, strict=False)]
    rows = {"results": [asdict(result) for result in results]}
    report("save_copies", sys.argv[1:], {"model": MODEL, "saves": options.saves}, table(results), rows, options.output)


def measured(network: Network, rate: Rate, saves: int, port: int) -> Result:
    """Both runs at a rate."""
    network.hold(rate)
    with tempfile.TemporaryDirectory() as folder:
        without, _ = run(network, Path(folder) / "without", saves, "", port)
        with_copies, node_bytes = run(network, Path(folder) / "with", saves, "--save-copies 2", port + 1)
    planned = node_bytes / rate.bytes_per_second if rate.is_limited else None
    return Result(str(rate), node_bytes, without, with_copies, planned)


def run(network: Network, folder: Path, saves: int, flags: str, port: int) -> tuple[float, int]:
    """The median seconds of a save, and the bytes of other nodes' files in the first node's folder. Raises RuntimeError if a rank fails."""
    disks = [folder / f"node_{node}" for node in range(NODES)]
    command = f"{MODEL} --train-iters {saves} --save-interval 1 --keep-last 1 --node-local-checkpoints {flags}"
    program = [sys.executable, str(ROOT / "pretrain_zeropp_gpt.py"), *command.split()]
    world = (NODES, RANKS_PER_NODE)
    printed = printed_by_ranks(network, world, port, lambda node: [*program, "--save", str(disks[node])], LONGEST_SECONDS)
    seconds = [float(found) for found in LATENCY.findall(printed[0])]
    own = {f"rank_{rank:05d}.safetensors" for rank in range(RANKS_PER_NODE)}
    copied = [path.stat().st_size for path in disks[0].glob("iter_*/*.safetensors") if path.name not in own]
    return statistics.median(seconds[1:]), sum(copied)


def table(results: Sequence[Result]) -> str:
    """One line per rate."""
    lines = []
    for result in results:
        planned = ("", "") if result.planned is None else (f"{result.planned:.2f}", f"{result.copies / result.planned:.2f}")
        seconds = (f"{value:.2f}" for value in (result.without, result.with_copies, result.copies))
        lines.append([result.rate, f"{result.node_bytes / 1e6:.1f}", *seconds, *planned])
    header = ["link of a node", "MB into a node", "save, s", "with copies, s", "copies, s", "planned, s", "copies over planned"]
    return in_table(header, lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="save_copies.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=Rate.parse, nargs="+", default=[Rate.parse(text) for text in ("50mbit", "200mbit", "1gbit")])
    parser.add_argument("--saves", type=int, default=6, help="saves of each run, the first of which is not counted")
    parser.add_argument("--output", type=Path, help="file to write results to")
    return parser


if __name__ == "__main__":
    main()
