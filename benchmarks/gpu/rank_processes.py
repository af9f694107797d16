"""Starts ranks as processes, on one GPU each or on one GPU together, and waits for them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time as clock
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.deadline import Deadline
from benchmarks.report import ROOT

POLL_SECONDS = 0.1
GRACE_SECONDS = 2.0  # for the other ranks to print their errors
KILL_SECONDS = 10.0
LAST_LINES = 60  # of what a rank has printed: a traceback, and before it the warnings of NCCL
# For ranks that are all on this machine. NCCL says why it refuses; and it looks for no other network, which may not be there.
VARIABLES = {
    "NCCL_DEBUG": "WARN",
    "NCCL_SOCKET_IFNAME": "=lo",  # this interface alone, not all whose names begin so
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


@dataclass(frozen=True)
class Sharing:
    """How ranks share GPUs: what is added to the environment of each. name: for people."""

    name: str
    common: Mapping[str, str] = field(default_factory=dict)
    has_own_host_id: bool = False

    def of_rank(self, rank: int) -> dict[str, str]:
        own = f"rank{rank}" if self.has_own_host_id else "one host"
        return {**self.common, "NCCL_HOSTID": own} if self.common or self.has_own_host_id else {}


ONE_GPU_EACH = Sharing("one GPU per rank, or the CPU")
# NCCL refuses two ranks on one GPU of one machine. With another host id, a rank counts as one of another machine.
HOST_IDS = Sharing("one GPU, and a host id of its own for each rank (NCCL_HOSTID)", has_own_host_id=True)
# From NCCL 2.30 on there is a switch.
MULTI_RANK = Sharing("one GPU, and NCCL_MULTI_RANK_GPU_ENABLE", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
FOUND_VARIABLE = "GPU_CHECK_SHARING"  # names the file in which a part leaves how ranks can share GPUs, for later parts


@dataclass(frozen=True)
class Ended:
    """How a rank has ended. code: None if it was still running. seconds: since the start of all. said: the last lines that it printed."""

    rank: int
    code: int | None
    seconds: float
    said: list[str]


class Ranks:
    """Processes that run `python words` as the ranks of a world; `end` kills those that are left."""

    def __init__(self, words: Sequence[str], world_size: int, sharing: Sharing, folder: Path, environment: Mapping[str, str]) -> None:
        self._logs = [folder / f"rank{rank}.txt" for rank in range(world_size)]
        self._start = clock.monotonic()
        self.processes = [
            _started(words, log, {**_environment(rank, world_size), **sharing.of_rank(rank), **environment})
            for rank, log in enumerate(self._logs)
        ]
        self._ended_at: dict[int, float] = {}

    def codes(self) -> list[int | None]:
        """The exit code of each rank; None for one that runs."""
        codes = [process.poll() for process in self.processes]
        now = clock.monotonic() - self._start
        for rank, code in enumerate(codes):
            if code is not None:
                self._ended_at.setdefault(rank, now)
        return codes

    def wait(self, time: Deadline) -> list[Ended]:
        """How the ranks have ended once all have, or one has failed and the others had time to say why, or the time is over."""
        while time.has(POLL_SECONDS) and None in self.codes() and not any(self.codes()):
            clock.sleep(POLL_SECONDS)
        grace = Deadline(GRACE_SECONDS)
        while any(self.codes()) and None in self.codes() and grace.has(POLL_SECONDS):
            clock.sleep(POLL_SECONDS)
        return self.ended()

    def ended(self) -> list[Ended]:
        now = clock.monotonic() - self._start
        return [
            Ended(rank, code, self._ended_at.get(rank, now), self._logs[rank].read_text(errors="replace").splitlines()[-LAST_LINES:])
            for rank, code in enumerate(self.codes())
        ]

    def kill(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGKILL)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):  # it waits for a broken device
                process.wait(KILL_SECONDS)


def run_ranks(
    words: Sequence[str],
    world_size: int,
    sharing: Sharing,
    folder: Path,
    time: Deadline,
    environment: Mapping[str, str] | None = None,
) -> list[Ended]:
    """How these ranks have ended, as `Ranks.wait` says it; those that are left are killed. They meet at a free port."""
    ranks = Ranks(words, world_size, sharing, folder, {"MASTER_PORT": str(free_ports(1)[0]), **(environment or {})})
    try:
        return ranks.wait(time)
    finally:
        ranks.end()


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, all different."""
    with ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def ran_out_of_time(ended: Sequence[Ended]) -> bool:
    """Whether the time was over before all ranks had ended, and none had failed."""
    codes = {end.code for end in ended}
    return None in codes and codes <= {None, 0}


def in_words(ended: Sequence[Ended]) -> list[str]:
    """A line per rank with the last that it said, which is mostly the error, and then all that each said."""
    names = [f"[rank {end.rank}, exit code {end.code}]" for end in ended]
    last = [" ".join([name, *end.said[-1:]]) for name, end in zip(names, ended, strict=True)]
    return last + [line for name, end in zip(names, ended, strict=True) for line in [name, *end.said]]


def write_job(job: Path, flags: Sequence[Sequence[str]]) -> None:
    """The file that rank_program.py reads."""
    ports = free_ports(len(flags))
    job.write_text(json.dumps([{"flags": list(one), "port": port} for one, port in zip(flags, ports, strict=True)]))


def _started(words: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )


def _environment(rank: int, world_size: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "SLURM", "OMPI", "PMI"))}
    return {
        **VARIABLES,
        **inherited,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
    }
