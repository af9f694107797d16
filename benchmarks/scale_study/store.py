"""What torch's own groups ask of the store, and how much a store answers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.scale_study.counted_store import CountedStore
from benchmarks.scale_study.members import answered

RANKS = (4, 8, 16)
PROCESSES, CLIENTS, SECONDS = 3, 8, 5.0  # that ask as fast as they can


@dataclass(frozen=True)
class Store:
    """of_group: by number of ranks, the operations of each of them to make one group of gloo. per_second: that a store answers."""

    of_group: dict[str, int]
    per_second: float


def measure() -> list[Store]:
    return [Store({str(ranks): _of_group(ranks) for ranks in RANKS}, _per_second())]


def _of_group(ranks: int) -> int:
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers: Any = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, ranks, store.port, answers)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return int(max(answered(processes, answers)))


def _rank(rank: int, ranks: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    store = CountedStore(dist.TCPStore("127.0.0.1", port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    answers.put(store.operations)
    dist.barrier()
    dist.destroy_process_group()


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
