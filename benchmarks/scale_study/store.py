"""What groups of gloo ask of the store, and take of memory; and how much a store answers."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import multiprocessing

from benchmarks.scale_study.counted_store import CountedStore
from benchmarks.scale_study.members import answered
from megatron_zpp.monitor.memory import PROCESS_STATUS, resident_bytes
from megatron_zpp.parallel.groups import WorldGroups, make_text_groups
from megatron_zpp.parallel.initialize import gather_texts

Make = Callable[[dist.Store, int, int], WorldGroups]

RANKS = (4, 16, 64)
PROCESSES, CLIENTS, SECONDS = 3, 8, 5.0  # that ask as fast as they can


@dataclass(frozen=True)
class Cost:
    """What groups of gloo cost: operations of the store, of the rank that asks most, and memory, the median of all ranks."""

    operations: int
    mib: float


@dataclass(frozen=True)
class Store:
    """all_ranks, texts: by number of ranks, what one group of gloo of all costs, and the groups for texts. per_second: operations that a
    store answers.
    """

    all_ranks: dict[str, Cost]
    texts: dict[str, Cost]
    per_second: float


def measure() -> list[Store]:
    all_ranks, texts = ({str(ranks): _cost(ranks, make) for ranks in RANKS} for make in (_all_ranks, _texts))
    return [Store(all_ranks, texts, _per_second())]


def _cost(ranks: int, make: Make) -> Cost:
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers: Any = context.Queue()
    processes = [context.Process(target=_rank, args=(make, rank, ranks, store.port, answers)) for rank in range(ranks)]
    for process in processes:
        process.start()
    operations, nbytes = zip(*answered(processes, answers), strict=True)
    return Cost(max(operations), statistics.median(nbytes) / 2**20)


def _rank(make: Make, rank: int, ranks: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    store = CountedStore(dist.TCPStore("127.0.0.1", port))
    before = resident_bytes(PROCESS_STATUS)
    groups = make(store, rank, ranks)
    gather_texts("", groups)  # until all have connected
    answers.put((store.operations, resident_bytes(PROCESS_STATUS) - before))
    gather_texts("", groups)
    dist.destroy_process_group()


def _all_ranks(store: dist.Store, rank: int, ranks: int) -> WorldGroups:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return WorldGroups()


def _texts(store: dist.Store, rank: int, ranks: int) -> WorldGroups:
    """As on GPUs, where torch's own group has no gloo."""
    dist.init_process_group("cuda:fake", store=store, rank=rank, world_size=ranks)
    return make_text_groups(ranks, rank, timedelta(minutes=5))


def _per_second() -> float:
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers: Any = context.Queue()
    processes = [context.Process(target=_clients, args=(store.port, answers)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    return float(sum(answered(processes, answers)) / SECONDS)


def _clients(port: int, answers: Any) -> None:
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(CLIENTS)]
    counts, end = [0] * CLIENTS, time.monotonic() + SECONDS

    def ask(client: int) -> None:
        while time.monotonic() < end:
            stores[client].add(str(client), 1)
            counts[client] += 1

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(sum(counts))
