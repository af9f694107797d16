"""Real gloo processes for tests, started once and used again: a world is the first so many of them."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore

from harness import forked, tiers


class RankFailure(RuntimeError):
    """At least one rank raised or died; the text holds what each rank said."""


class RankPool:
    """Processes that run `function(*args)` as the ranks of a world, with torchrun's environment."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, nodes: int, ranks_per_node: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 240) -> list[Any]:
        """What `function` returns on each rank, in rank order. A rank that fails ends the pool and raises RankFailure."""
        tiers.require("gloo")
        world_size = nodes * ranks_per_node
        self._grow(world_size)
        # As torchrun does, the store is there before the ranks: one that comes too early for it would wait for its next attempt.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(world_size):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % ranks_per_node),
                "LOCAL_WORLD_SIZE": str(ranks_per_node),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
            self._workers[rank][1].send((environment, function, args))
        return self._collect(world_size, timeout_seconds)

    def close(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def _grow(self, world_size: int) -> None:
        while len(self._workers) < world_size:
            ours, theirs = forked.CONTEXT.Pipe()
            process = forked.start_process(_serve, theirs, daemon=True)
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, world_size: int, timeout_seconds: float) -> list[Any]:
        waiting = {self._workers[rank][1]: rank for rank in range(world_size)}
        results: list[Any] = [None] * world_size
        failures: list[str] = []
        while waiting and not failures:
            ready = wait(list(waiting), timeout_seconds)
            if not ready:
                failures.append(f"ranks {sorted(waiting.values())} gave no answer within {timeout_seconds} s")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    is_error, results[rank] = connection.recv()
                except EOFError:
                    is_error, results[rank] = True, f"exit code {self._exit_code(rank)}"
                if is_error:
                    failures.append(f"rank {rank}: {results[rank]}")
        if failures:
            self.close()
            raise RankFailure("\n".join(failures))
        return results

    def _exit_code(self, rank: int) -> int | None:
        self._workers[rank][0].join(10)
        return self._workers[rank][0].exitcode


def _serve(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            environment, function, args = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        gc.collect()  # what the last run left: only now have its threads ended, which hold its groups
        gc.freeze()  # what is left are modules: the collection at the end of every run need not look at them again
        try:
            answer = (False, function(*args))
        except Exception:
            answer = (True, traceback.format_exc())
        connection.send(answer)


def free_port() -> int:
    """A port that nobody listens on, below those that a kernel gives to outgoing connections: these come and go all the time."""
    for port in random.SystemRandom().sample(range(10000, 32768), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("1000 ports from 10000 to 32767 are in use")
