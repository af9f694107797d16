"""Ranks in nodes that are network namespaces: starts them and waits for them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from testbed.network import INTERFACE, Network


def start_rank(
    network: Network, rank: int, world: tuple[int, int], port: int, command: Sequence[str], **options: Any
) -> subprocess.Popen[str]:
    """Starts a rank in its node. world: number of nodes, and of ranks on each. options: of Popen; without stdout it is not kept."""
    nodes, ranks_per_node = world
    node, local_rank = divmod(rank, ranks_per_node)
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [*network.inside(node), *command],
        env={**os.environ, **environment},
        text=True,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG: none outlives this program
        **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **options},
    )


def printed_by_ranks(
    network: Network, world: tuple[int, int], port: int, command_of: Callable[[int], Sequence[str]], limit_seconds: float
) -> list[str]:
    """What each rank has printed. command_of: gives that of a node's ranks. Raises RuntimeError with all of it if one fails."""
    nodes, ranks_per_node = world
    ranks = [
        start_rank(network, rank, world, port, command_of(rank // ranks_per_node), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(nodes * ranks_per_node)
    ]
    ended = outcome(ranks, limit_seconds)
    if any(code for code, _ in ended):
        raise RuntimeError("\n".join(f"rank {rank}: exit code {code}\n{printed}" for rank, (code, printed) in enumerate(ended)))
    return [printed for _, printed in ended]


def outcome(processes: Sequence[subprocess.Popen[str]], limit_seconds: float) -> list[tuple[int, str]]:
    """Exit code of every rank, and what it printed where this is kept; a rank that does not end is killed and has a negative one."""
    deadline = time.monotonic() + limit_seconds
    found = []
    for process in processes:
        try:
            printed = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            printed = process.communicate()
        found.append((process.returncode, "".join(filter(None, printed))))
    return found
