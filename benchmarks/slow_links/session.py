"""The parent's side of every measurement: starts ranks in the network, sets rates, asks for steps, reads the kernel's counters."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.slow_links.configurations import Workload
from benchmarks.slow_links.ranks import PORT, Ranks
from testbed.network import INTERFACE, Network, interface_bytes
from testbed.rates import Rate

COLLECTIVE_SECONDS = 600.0
MOST_SECONDS_PER_STEP = 300.0
LOCAL_PROBE_BYTES = 8 << 20
LARGEST_LOCAL_SHARE = 0.01
PROBES = 5
FEWEST_STEPS, MOST_STEPS = 2, 20


@dataclass(frozen=True)
class Measured:
    """Some steps of one configuration. seconds: per step, on the slowest rank; bytes are per step and node.

    kernel_bytes: received bytes, the mean over nodes. ledger_bytes: weights and gradients; control_bytes: all else in the ledger.
    hidden: seconds and collectives per step by kind, of rank 0; empty unless profiled.
    """

    steps: int
    seconds: float
    kernel_bytes: float
    ledger_bytes: float | None
    control_bytes: float | None
    loss: float
    hidden: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Session:
    """All configurations of one workload, built in the ranks and ready to run in turns."""

    def __init__(self, workload: Workload, names: Sequence[str]) -> None:
        self._workload = workload
        self.network = Network(workload.nodes)
        inside = [self.network.inside(node) for node in range(workload.nodes)]
        environment = {
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "SLOW_LINKS_BACKEND": "gloo",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workload.world_size)),
        }
        self.ranks = Ranks(inside, workload.ranks_per_node, self.network.address(0), environment)
        try:
            self.machine = self.ranks.start(COLLECTIVE_SECONDS)
            for name in names:
                self.build(name, workload.flags(name))
        except BaseException:
            self.close()
            raise

    def build(self, name: str, flags: Sequence[str]) -> None:
        """Builds a configuration, which trains on random tokens and is ready to run at full speed."""
        self.ranks.ask_all(COLLECTIVE_SECONDS, ask="build", name=name, flags=list(flags))

    def build_on_text(self, name: str, flags: Sequence[str], text: Path, held_out: int) -> None:
        """Builds a configuration that trains on a text from its first step on. held_out: samples at its end that `evaluate` reads."""
        length = self._workload.model_config.seq_length
        self.ranks.ask_all(
            COLLECTIVE_SECONDS, ask="build_on_text", name=name, flags=list(flags), path=str(text), seq_length=length, held_out=held_out
        )

    def evaluate(self, name: str) -> float:
        """The mean loss of the held-out samples."""
        return statistics.mean(answer["loss"] for answer in self.ranks.ask_all(COLLECTIVE_SECONDS, ask="evaluate", name=name))

    def drop(self, name: str) -> None:
        self.ranks.ask_all(COLLECTIVE_SECONDS, ask="drop", name=name)

    def check_nodes_keep_to_themselves(self) -> int:
        """Bytes that a collective inside each node put on the node's link. Raises RuntimeError if they are more than 1 % of it."""
        before = self._received()
        self.ranks.ask_all(COLLECTIVE_SECONDS, ask="gather_in_node", nbytes=LOCAL_PROBE_BYTES)
        crossed = max(after - earlier for after, earlier in zip(self._received(), before, strict=True))
        if crossed > LARGEST_LOCAL_SHARE * LOCAL_PROBE_BYTES:
            raise RuntimeError(f"a collective of {LOCAL_PROBE_BYTES} bytes inside a node put {crossed} bytes on its link to the others")
        return crossed

    def achieved(self, nbytes: int) -> Rate:
        """The rate at which `nbytes` go from each node to the next, all nodes at once, after a pause: the median of several tries."""
        nodes = self._workload.nodes
        return Rate(statistics.median(self._send(node, (node + 1) % nodes, nbytes) for _ in range(PROBES) for node in range(nodes)))

    def _send(self, node: int, to_node: int, nbytes: int) -> float:
        address, ranks_per_node = self.network.address(to_node), self._workload.ranks_per_node
        questions = {
            to_node * ranks_per_node: {"ask": "receive", "address": address, "nbytes": nbytes},
            node * ranks_per_node: {"ask": "send", "address": address, "nbytes": nbytes},
        }
        received, sent = self.ranks.ask(questions, MOST_SECONDS_PER_STEP)
        return 8 * nbytes / (received["end"] - sent["start"])

    def run(self, name: str, seconds: float, *, is_profiled: bool = False, multiple: int = 1) -> Measured:
        """Runs one step that is not measured, then a multiple of `multiple` that takes about `seconds`."""
        first = self.run_steps(name, 1)
        steps = min(MOST_STEPS, max(FEWEST_STEPS, round(seconds / max(first.seconds, 1e-3))))
        return self.run_steps(name, math.ceil(steps / multiple) * multiple, is_profiled=is_profiled)

    def run_steps(self, name: str, steps: int, *, is_profiled: bool = False) -> Measured:
        before = self._received()
        limit = MOST_SECONDS_PER_STEP * steps
        answers = self.ranks.ask_all(limit, ask="run", name=name, steps=steps, is_profiled=is_profiled)
        crossed = [after - earlier for after, earlier in zip(self._received(), before, strict=True)]
        booked = answers[0]["ledger"]
        return Measured(
            steps=steps,
            seconds=max(answer["seconds"] for answer in answers) / steps,
            kernel_bytes=statistics.mean(crossed) / steps,
            ledger_bytes=booked["promised"] / steps if booked else None,
            control_bytes=booked["control"] / steps if booked else None,
            loss=answers[0]["loss"],
            hidden={kind: value / steps for kind, value in answers[0]["hidden"].items()},
        )

    def _received(self) -> list[int]:
        time.sleep(0.01)  # acknowledgements may still be under way
        ranks_per_node = self._workload.ranks_per_node
        return [interface_bytes(self.ranks.processes[node * ranks_per_node].pid) for node in range(self._workload.nodes)]

    def end(self) -> None:
        self.ranks.end()

    def close(self) -> None:
        """Kills the ranks that are left; the network ends with this process."""
        self.ranks.kill()
