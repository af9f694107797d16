"""Starts runs that lose a rank, and tells how the others end."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.forked import Forked
from harness.places import HARNESS
from harness.rank_pool import free_port
from harness.tiny_runs import TINY

PROGRAM = HARNESS / "lost_rank.py"
TIMEOUT_SECONDS = 60.0  # --distributed-timeout-minutes 1
LONGEST_SECONDS = 400.0  # with the time to start


@dataclass(frozen=True)
class Loss:
    """Which rank of how many is lost, where in the run, and by which signal.

    tensor_ranks, context_ranks: how many share layers, and samples. nodes: among which the ranks are divided equally.
    """

    where: str
    how: signal.Signals
    rank: int
    world_size: int = 3
    tensor_ranks: int = 1
    context_ranks: int = 1
    nodes: int = 1

    def __str__(self) -> str:
        return f"{self.where}, rank {self.rank} of {self.world_size}, {self.how.name}"


@dataclass(frozen=True)
class End:
    """How a rank ended. seconds: since the loss."""

    rank: int
    code: int
    errors: str
    seconds: float


def environments(world_size: int, port: int, nodes: int = 1, **more: str) -> list[dict[str, str]]:
    """Of ranks that nobody but their variables tells of each other, so that rank 0 holds the store."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "SLURM", "OMPI", "PMI"))}
    common = {
        **inherited,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank % (world_size // nodes))} for rank in range(world_size)]


def ends_after(losses: list[Loss], folder: Path) -> dict[Loss, list[End]]:
    """How the other ranks end after each of the losses, whose runs go on side by side. Raises RuntimeError if a rank was not lost."""
    ports: set[int] = set()
    while len(ports) < len(losses):
        ports.add(free_port())
    runs = [_Run(loss, folder / str(loss), port) for loss, port in zip(losses, ports, strict=True)]
    with ThreadPoolExecutor(len(runs)) as watchers:
        return dict(zip(losses, watchers.map(_Run.ends, runs), strict=True))


class _Run:
    def __init__(self, loss: Loss, saved: Path, port: int) -> None:
        flags = "--zero-stage 3 --train-iters 4 --eval-iters 1 --eval-interval 2 --save-interval 3 --distributed-timeout-minutes 1"
        shares = ["--tensor-model-parallel-size", loss.tensor_ranks, "--context-parallel-size", loss.context_ranks]
        words = [*TINY, *flags.split(), *shares, "--save", saved]
        where = {"WHERE": loss.where, "HOW": loss.how.name, "LOST": str(loss.rank)}
        self._loss = loss
        self._started = time.monotonic()
        of_ranks = environments(loss.world_size, port, loss.nodes, **where)
        self._ranks = [Forked(PROGRAM, *words, environment=environment) for environment in of_ranks]

    def ends(self) -> list[End]:
        others = [rank for rank in range(self._loss.world_size) if rank != self._loss.rank]
        lost, ended = 0.0, dict.fromkeys(others, 0.0)
        while not (lost and all(ended.values())) and time.monotonic() - self._started < LONGEST_SECONDS:
            now = time.monotonic()
            if not lost and self._is_lost():
                lost = now
            ended = {rank: at or (0.0 if self._ranks[rank].process.is_alive() else now) for rank, at in ended.items()}
            time.sleep(0.05)
        if self._ranks[self._loss.rank].process.is_alive():
            self._ranks[self._loss.rank].process.kill()
        code = self._ranks[self._loss.rank].finished(10.0).returncode
        done = {rank: self._ranks[rank].finished(1.0) for rank in others}
        if code != -signal.SIGKILL:
            raise RuntimeError(f"{self._loss} ended with exit code {code}, and the others with {done}")
        return [End(rank, done[rank].returncode, done[rank].stderr, ended[rank] - lost) for rank in others]

    def _is_lost(self) -> bool:
        try:
            state = Path(f"/proc/{self._ranks[self._loss.rank].process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state in "TZX"
