"""Runs whose nodes have a network and a disk of their own, under one path; a program for test_own_disks.

    PYTHONPATH=tests python -m harness.own_disks FOLDER KILLS

Node n is a network namespace, and its processes see FOLDER/node_n, and no other node's, at FOLDER/disk. Prints JSON: what `main` says.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.parts import all_in
from harness.places import ROOT
from harness.tiny_runs import TINY, losses, records_of
from testbed.network import Network, interface_bytes
from testbed.network_ranks import outcome, start_rank
from testbed.sandbox import enter_own_network

RANKS_PER_NODE = 2
LONGEST_SECONDS = 300.0
RUN = "--zero-stage 3 --node-local-checkpoints --global-batch-size 24 --micro-batch-size 1"
# What a process does before its program: a disk of its node, and none of another.
MOUNT = 'mount --bind "$0" "$1/disk" && for node in "$1"/node_*; do mount -t tmpfs none "$node"; done && shift && exec "$@"'


class Nodes:
    """`order`: for each node of a run, which disk it has."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network = network
        self._folder = folder
        self._port = 29500
        (folder / "disk").mkdir()
        (folder / "logs").mkdir()

    def start(self, order: Sequence[str], flags: str) -> list[subprocess.Popen[str]]:
        """The processes of all ranks, in rank order."""
        self._port += 1
        return [self._start_rank(rank, order, flags) for rank in range(len(order) * RANKS_PER_NODE)]

    def _start_rank(self, rank: int, order: Sequence[str], flags: str) -> subprocess.Popen[str]:
        disk = self._folder / f"node_{order[rank // RANKS_PER_NODE]}"
        disk.mkdir(exist_ok=True)
        own_disk = ["unshare", "--mount", "sh", "-c", MOUNT, str(disk), str(self._folder)]
        program = [sys.executable, str(ROOT / "pretrain_zeropp_gpt.py"), *TINY, *RUN.split(), *flags.split()]
        command, world = [*own_disk, *program], (len(order), RANKS_PER_NODE)
        return start_rank(
            self._network, rank, world, self._port, command, cwd=self._folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, order: Sequence[str], flags: str) -> tuple[list[int], str]:
        """Exit codes of all ranks, and what rank 0 printed."""
        found = outcome(self.start(order, flags), LONGEST_SECONDS)
        return [code for code, _ in found], found[0][1]

    def received(self, order: Sequence[str], flags: str) -> tuple[list[int], str, int]:
        """The same, and the bytes that the first node received from others."""
        holder = subprocess.Popen([*self._network.inside(0), "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
        try:
            assert holder.stdout is not None
            holder.stdout.readline()  # now it is in the node
            before = interface_bytes(holder.pid)
            codes, text = self.run(order, flags)
            return codes, text, interface_bytes(holder.pid) - before
        finally:
            holder.kill()
            holder.wait()


def killed(nodes: Nodes, log: Path, order: str, flags: str, victim: int, after: int, seconds: float) -> list[int]:
    """Kills all ranks of a node some seconds after the log has so many lines more. Returns the exit codes."""
    lines = lines_of(log) + after
    processes = nodes.start(order, flags)
    while lines_of(log) < lines and all(process.poll() is None for process in processes):
        time.sleep(0.01)
    time.sleep(seconds)
    for process in processes[victim * RANKS_PER_NODE : (victim + 1) * RANKS_PER_NODE]:
        process.kill()
    return [code for code, _ in outcome(processes, LONGEST_SECONDS)]


def differing(log: Path, expected: Sequence[tuple[float, float]]) -> tuple[list[int], list[int]]:
    """The iterations in the log whose loss or norm is another one, and all of them."""
    records = [record for record in records_of(log) if "lm_loss" in record]
    steps = [record["iteration"] for record in records]
    others = [step for step, record in zip(steps, records, strict=True) if (record["lm_loss"], record["grad_norm"]) != expected[step - 1]]
    return others, steps


def lines_of(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def main() -> None:
    enter_own_network(sys.argv)
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    nodes = Nodes(Network(3), folder)
    saving = f"--save {folder / 'disk'} --load {folder / 'disk'} --save-interval 1 --async-save --keep-last 2"
    found: dict[str, Any] = {}

    logs = folder / "logs"
    end = 8 + 4 * kills
    found["unbroken"] = nodes.run("ab", f"--train-iters {end} {saving} --log-jsonl {logs / 'unbroken.jsonl'}")[0]
    expected = losses(records_of(logs / "unbroken.jsonl"))

    # Killed again and again, then to the end: every step that any of the runs has taken has the loss of the unbroken one.
    chance, log = random.Random(1), logs / "killed.jsonl"
    found["killed"] = [
        killed(nodes, log, "cd", f"--train-iters {end} {saving} --log-jsonl {log}", kill % 2, chance.randint(1, 3), chance.uniform(0, 0.1))
        for kill in range(kills)
    ]
    found["after kills"] = nodes.run("cd", f"--train-iters {end} {saving} --log-jsonl {log}")[0]
    found["differing"], steps = differing(log, expected)
    found["repeated"] = max([0, *(last - first + 1 for last, first in pairwise(steps) if first <= last)])
    found["iterations"] = sorted(set(steps)) == list(range(1, end + 1))

    # Killed, each time with the disk of the node, where every file has a copy on the other node.
    log, lost_disks = logs / "lost.jsonl", -(-kills // 5)
    stop = 8 + 4 * lost_disks
    copying = f"{saving} --save-copies 2 --train-iters {end} --exit-interval {stop} --log-jsonl {log}"
    for kill in range(lost_disks):
        killed(nodes, log, "gh", copying, kill % 2, chance.randint(2, 4), chance.uniform(0, 0.1))
        shutil.rmtree(folder / f"node_{'gh'[kill % 2]}")
    found["after lost disks"] = nodes.run("gh", copying)[0]
    found["differing after lost disks"], steps = differing(log, expected)
    found["iterations after lost disks"] = sorted(set(steps)) == list(range(1, stop + 1))
    found["one of two with copies"] = nodes.run("h", f"--load {folder / 'disk'} --train-iters {stop} --override-opt-param-scheduler")[0]

    # Loading alone: a run that has nothing left to train.
    loading = f"--load {folder / 'disk'} --train-iters {end}"
    (folder / "node_together").mkdir()
    all_in([folder / "node_a", folder / "node_b"], folder / "node_together")
    for name, order in {"same": "ab", "swapped": "ba", "three": "abe"}.items():
        codes, text, nbytes = nodes.received(order, loading)
        found[name] = [codes, nbytes, next((line for line in text.splitlines() if "disks of other nodes" in line), "")]
    found["files"] = sum(path.stat().st_size for path in (folder / "node_a").glob(f"iter_{end:07d}/*.safetensors"))
    found["one of two"] = nodes.run("a", loading)
    found["one of both"] = nodes.run(["together"], loading)[0]
    # On other nodes: losses of the next steps.
    for order in ("ab", "ba", "abe"):
        log = logs / f"{order}.jsonl"
        codes, text = nodes.run(order, f"--load {folder / 'disk'} --train-iters {end + 3} --override-opt-param-scheduler --log-jsonl {log}")
        if any(codes):
            raise RuntimeError(text)
        found[f"losses {order}"] = losses(records_of(log))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
