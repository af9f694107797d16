"""The first report of a failure in a run of thousands: the rank that reports looks which of the others live. Here none does."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.scale_study.counted_store import CountedStore
from megatron_zpp.parallel.failures.failure_board import FailureBoard
from megatron_zpp.parallel.failures.pulse import pulse_key

RANKS = (64, 512, 4096, 16384)


@dataclass(frozen=True)
class Report:
    """operations: of the store, by the rank that reports. seconds: six of them are the time that a rank without a pulse is given."""

    ranks: int
    operations: int
    seconds: float


def measure() -> list[Report]:
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [measured(held, ranks) for ranks in RANKS]


def measured(held: dist.TCPStore, ranks: int) -> Report:
    store = CountedStore(dist.PrefixStore(str(ranks), dist.TCPStore("127.0.0.1", held.port, is_master=False, wait_for_workers=False)))
    for rank in range(ranks):
        FailureBoard(store, rank, ranks).enter()
        store.add(pulse_key(rank), 1)
    store.asked.clear()
    begun = time.monotonic()
    said = FailureBoard(store, 1, ranks).report("out of memory")
    if "show no sign of life" not in said:
        raise RuntimeError(f"the silent ranks were not found: {said}")
    return Report(ranks, store.operations, time.monotonic() - begun)
