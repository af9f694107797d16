"""Divides the cores of a machine among its ranks, for AdamW on the host."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch

from megatron_zpp.config.counted import counted
from megatron_zpp.config.schema import Config
from megatron_zpp.parallel.initialize import World


def threads_of_rank(rank: int, hosts: Sequence[str], cores: Sequence[Sequence[int]]) -> int:
    """The threads that this rank may use: its cores, divided by the ranks of its machine that may use one of them; at least 1.

    hosts, cores: name of the machine, and numbers of the cores that the rank may use, by rank.
    """
    own = set(cores[rank])
    sharers = sum(host == hosts[rank] and not own.isdisjoint(theirs) for host, theirs in zip(hosts, cores, strict=True))
    return max(1, len(own) // sharers)


def share_cores(config: Config, world: World, hosts: Sequence[str]) -> str:
    """Sets the threads of torch on the host, if the optimizer is kept on the host of a GPU; returns a line about it, or an empty one.

    Launchers give each rank one thread, which is too few for AdamW. Without a GPU all computation has the same threads, which stay as they
    are. Every rank must call it. hosts: name of the machine of every rank.
    """
    if not config.zero.optimizer_cpu_offload:
        return ""
    if world.device.type != "cuda":
        return "--optimizer-cpu-offload: this device is the host, so nothing is moved and no memory is saved; losses are the same"
    cores = [json.loads(text) for text in world.gather_texts(json.dumps(own_cores()))]
    threads = threads_of_rank(world.rank, hosts, cores)
    torch.set_num_threads(threads)
    ranks = hosts.count(hosts[world.rank])
    return f"--optimizer-cpu-offload: AdamW has {counted(threads, 'thread')} per rank, for {counted(ranks, 'rank')} on this machine"


def own_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
