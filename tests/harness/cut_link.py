"""A run on two nodes whose link is cut in mid-step, then the same command again; a program for test_link_fault.

    PYTHONPATH=tests python -m harness.cut_link FOLDER

Prints JSON: exit codes and last words of every rank of both runs, and the seconds from the cut to the end of the last rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from harness.places import ROOT
from harness.tiny_runs import TINY
from testbed.network import Network
from testbed.network_ranks import outcome, start_rank
from testbed.rates import UNLIMITED, Rate
from testbed.sandbox import enter_own_network

NODES, RANKS_PER_NODE = 2, 2
SLOW = Rate.parse("1mbit")  # a step is on the link for most of its time
TIMEOUT_MINUTES = 1
TRAIN_ITERS, SAVE_INTERVAL = 12, 3
LONGEST_SECONDS = 200.0


def command(folder: Path) -> list[str]:
    flags = f"--bf16 --zero-stage 3 --train-iters {TRAIN_ITERS} --save-interval {SAVE_INTERVAL} --save {folder} --load {folder} "
    flags += f"--distributed-timeout-minutes {TIMEOUT_MINUTES} --log-jsonl {folder / 'run.jsonl'}"
    return [sys.executable, str(ROOT / "pretrain_zeropp_gpt.py"), *TINY, *flags.split()]


def start(network: Network, folder: Path, port: int) -> list[subprocess.Popen[str]]:
    world = (NODES, RANKS_PER_NODE)
    return [start_rank(network, rank, world, port, command(folder)) for rank in range(NODES * RANKS_PER_NODE)]


def main() -> None:
    enter_own_network(sys.argv)
    folder = Path(sys.argv[1])
    network = Network(NODES)
    network.hold(SLOW)
    ranks = start(network, folder, 29500)
    while not list(folder.glob("iter_*/manifest.json")) and all(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    time.sleep(0.7)  # into the next step
    network.cut(1)
    cut = time.monotonic()
    first = outcome(ranks, LONGEST_SECONDS)
    seconds = time.monotonic() - cut
    network.restore(1)
    network.hold(UNLIMITED)
    second = outcome(start(network, folder, 29501), LONGEST_SECONDS)
    print(json.dumps({"cut_to_end_seconds": seconds, "first": first, "second": second}))


if __name__ == "__main__":
    main()
