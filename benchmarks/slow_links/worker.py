"""One rank: builds every configuration in one process group, and answers its parent's questions, JSON objects on standard input.

Questions and answers go through pipes, so that only the measured steps cross the links.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.loss_study.text import Text
from benchmarks.slow_links.batches import text_batches
from benchmarks.slow_links.configurations import DEEPSPEEDS, FSDP2
from benchmarks.slow_links.deepspeed_zero3 import DeepSpeedTraining, installed_version, load
from benchmarks.slow_links.fsdp2 import Fsdp2Training
from benchmarks.slow_links.ours import Learner, OurTraining, Training
from megatron_zpp.monitor.memory import read_memory
from megatron_zpp.parallel.initialize import World, choose_device
from megatron_zpp.parallel.launch import read_launch

PROBE_PORT = 29700
PROBE_PAUSE_SECONDS = 0.3  # long enough for the token bucket to fill
SECONDS_WITHOUT_ANSWER = 60.0
LEARNING_STEPS = 2  # DeepSpeed gathers ahead of use once it has recorded the order of the modules in its second step


class Rank:
    """The trainings of this rank, by name."""

    def __init__(self, timeout: timedelta) -> None:
        launch = read_launch(os.environ)
        self._launch = launch
        self._world = World(launch, choose_device(launch, os.environ.get("SLOW_LINKS_BACKEND")), timeout)
        self._trainings: dict[str, Training] = {}
        self._learners: dict[str, Learner] = {}
        self._held_out: list[Tensor] = []
        ranks_per_node = launch.local_world_size or 1
        firsts = range(0, launch.world_size, ranks_per_node)
        nodes = [dist.new_group(range(first, first + ranks_per_node), backend="gloo") for first in firsts]
        self._own_node = nodes[launch.rank // ranks_per_node]

    def introduce(self) -> dict[str, Any]:
        return {"device": self._world.device.type, "torch": torch.__version__, "deepspeed": installed_version()}

    def load(self, name: str) -> dict[str, Any]:
        """Imports what a peer needs, so that this memory does not count as its model's."""
        if name in DEEPSPEEDS:
            load(self._world.device)
        return {}

    def build(self, name: str, flags: list[str]) -> dict[str, Any]:
        """Builds a configuration that trains on random tokens, and runs the steps in which it may still learn its own order."""
        peers: dict[str, Callable[..., Training]] = {FSDP2: Fsdp2Training}
        peers |= {peer: partial(DeepSpeedTraining, peer) for peer in DEEPSPEEDS}
        training = peers.get(name, OurTraining)(flags, self._launch, self._world)
        self._trainings[name] = training
        for _ in range(LEARNING_STEPS):
            training.step()
        training.drain()
        return {"resident_bytes": _resident_bytes()}

    def build_on_text(self, name: str, flags: list[str], path: str, seq_length: int, held_out: int) -> dict[str, Any]:
        """Builds a configuration, ours or FSDP2's, that trains on the text at `path` from its first step on."""
        text = Text(Path(path).read_bytes(), seq_length, held_out)
        kind = Fsdp2Training if name == FSDP2 else OurTraining
        training = kind(flags, self._launch, self._world, partial(text_batches, text, self._launch.world_size))
        self._trainings[name] = self._learners[name] = training
        self._held_out = [part.chunk(self._launch.world_size)[self._launch.rank] for part in text.held_out()]
        return {}

    def evaluate(self, name: str) -> dict[str, Any]:
        """The mean loss of this rank's part of the held-out samples; parts are equal."""
        return {"loss": self._learners[name].mean_loss(*self._held_out)}

    def drop(self, name: str) -> dict[str, Any]:
        """Frees a configuration."""
        self._trainings.pop(name).close()
        self._learners.pop(name, None)
        return {}

    def run(self, name: str, steps: int, is_profiled: bool = False) -> dict[str, Any]:
        """Seconds until `steps` steps and all their hops have ended, and the bytes that the ledger booked for them."""
        training = self._trainings[name]
        lanes = getattr(training, "lanes", None)
        if lanes is not None:
            lanes.is_running = is_profiled
        before, start = training.node_bytes(), time.perf_counter()
        losses = [training.step() for _ in range(steps)]
        training.drain()
        seconds = time.perf_counter() - start
        booked = {kind: nbytes - before[kind] for kind, nbytes in training.node_bytes().items()}
        return {"seconds": seconds, "loss": losses[-1], "ledger": booked, "hidden": lanes.readings() if lanes is not None else {}}

    def gather_in_node(self, nbytes: int) -> dict[str, Any]:
        """Runs a collective that must stay inside the node."""
        own = torch.zeros(nbytes, dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self._own_node))]
        dist.all_gather(parts, own, group=self._own_node)
        return {}

    def send(self, address: str, nbytes: int) -> dict[str, Any]:
        """Sends `nbytes` to a waiting receiver after a pause; returns the time of the start, on a clock that the whole machine shares."""
        with _connected(address) as link:
            link.recv(1)
            time.sleep(PROBE_PAUSE_SECONDS)
            start = time.monotonic()
            link.sendall(bytes(nbytes))
        return {"start": start}

    def receive(self, address: str, nbytes: int) -> dict[str, Any]:
        """Receives `nbytes`; returns the time at which the last of them arrived."""
        buffer = bytearray(1 << 20)
        with socket.create_server((address, PROBE_PORT)) as server:
            server.settimeout(SECONDS_WITHOUT_ANSWER)
            link, _ = server.accept()
            with link:
                link.settimeout(SECONDS_WITHOUT_ANSWER)
                link.sendall(b"+")
                received = 0
                while received < nbytes:
                    count = link.recv_into(buffer)
                    if count == 0:
                        raise RuntimeError(f"the sender left after {received} of {nbytes} bytes")
                    received += count
        return {"end": time.monotonic()}

    def reset_peak(self) -> dict[str, Any]:
        """Resets the peak of memory; returns the memory that is held now."""
        if self._world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._world.device)
            return {"held_bytes": torch.cuda.memory_allocated(self._world.device)}
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
        return {"held_bytes": _resident_bytes()}

    def peak(self) -> dict[str, Any]:
        return {"peak_bytes": read_memory(self._world.device).max_allocated_bytes}

    def end(self) -> dict[str, Any]:
        for training in self._trainings.values():
            training.close()
        self._world.leave()
        return {}


def _connected(address: str) -> socket.socket:
    deadline = time.monotonic() + SECONDS_WITHOUT_ANSWER
    while True:
        try:
            return socket.create_connection((address, PROBE_PORT), SECONDS_WITHOUT_ANSWER)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with answers
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank: Rank | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if rank is None:
                rank = Rank(timedelta(seconds=question["timeout_seconds"]))
                answer = rank.introduce()
            else:
                answer = getattr(rank, question.pop("ask"))(**question)
        except Exception:
            answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")
            answers.flush()
            os._exit(1)
        answers.write(json.dumps(answer) + "\n")
    answers.flush()
    os._exit(0)  # at once, because gloo's threads must not free tensors while the interpreter shuts down


if __name__ == "__main__":
    main()
