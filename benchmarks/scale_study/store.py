"""What torch's own groups ask of the store, and how much a store answers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.scale_study.counted_store import CountedStore
from benchmarks.scale_study.members import answered
from megatron_zpp.parallel.groups import make_text_groups

RANKS = (4, 8, 16)
PROCESSES, CLIENTS, SECONDS = 3, 8, 5.0  # that ask as fast as they can


@dataclass(frozen=True)
class Store:
    """of_group, of_texts: by number of ranks, the operations of the rank that asks most, to make one group of gloo of all ranks, and the
    groups for texts. per_second: that a store answers.
    """

    of_group: dict[str, int]
    of_texts: dict[str, int]
    per_second: float


def measure() -> list[Store]:
    asked = {str(ranks): _of_groups(ranks) for ranks in RANKS}
    return [Store({ranks: one for ranks, (one, _) in asked.items()}, {ranks: texts for ranks, (_, texts) in asked.items()}, _per_second())]


def _of_groups(ranks: int) -> tuple[int, int]:
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers: Any = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, ranks, store.port, answers)) for rank in range(ranks)]
    for process in processes:
        process.start()
    of_group, of_texts = zip(*answered(processes, answers), strict=True)
    return max(of_group), max(of_texts)


def _rank(rank: int, ranks: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    store = CountedStore(dist.TCPStore("127.0.0.1", port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    of_group = store.operations
    make_text_groups(ranks, rank, timedelta(minutes=1))
    answers.put((of_group, store.operations - of_group))
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
