"""Times what a rank's processor spends on bytes that gloo gathers and exchanges over loopback.

    python -m benchmarks.sockets --output benchmarks/results/sockets_cpu.json

Two ranks send each other payloads as the lanes do, gathers and exchanges in turns. Times are those of the processor, of all threads of a
rank, in its own code and in the kernel, per byte that the rank receives; it sends as many. Medians over rounds and ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.report import report
from megatron_zpp.comm.backend import TorchBackend
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Direction, Lane, Link

RANKS = 2
MEGABYTES = (1, 4)
SMALL_BYTES = 1024
CALLS = 12
LANE = Lane(Link.INTER, Direction.CLIMB)


@dataclass(frozen=True)
class Result:
    """nbytes: that a rank receives in a call. processor_seconds, seconds: of one call."""

    collective: str
    nbytes: int
    processor_seconds: float
    seconds: float

    @property
    def per_byte(self) -> float:
        return self.processor_seconds / self.nbytes


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="JSON", help="file to write")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args(arguments)
    results = measure(options.rounds)
    report("sockets", arguments, {"ranks": RANKS}, table(results), {"results": [asdict(one) for one in results]}, options.output)
    return 0


def measure(rounds: int) -> list[Result]:
    """One result for each collective and size."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers: Any = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(rank, store.port, rounds, answers)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    of_ranks = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    return [
        Result(
            *case, *(statistics.median(column) for column in zip(*(sample for found in of_ranks for sample in found[case]), strict=True))
        )
        for case in of_ranks[0]
    ]


def seconds_per_byte(results: list[Result], collective: str) -> float:
    """Of the processor, the mean over payloads of MEGABYTES."""
    return statistics.mean(one.per_byte for one in results if one.collective == collective and one.nbytes > SMALL_BYTES)


def seconds_per_collective(results: list[Result]) -> float:
    """How long small messages take."""
    return statistics.mean(one.seconds for one in results if one.nbytes == SMALL_BYTES)


def _rank(rank: int, port: int, rounds: int, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=RANKS)
    backend = TorchBackend(Grid.of_nodes(RANKS, 1), rank, {LANE: dist.new_group()})
    cases = [(name, nbytes) for name in ("gather", "exchange") for nbytes in (SMALL_BYTES, *(size * 2**20 for size in MEGABYTES))]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(1 + rounds):
        for case in cases:
            found[case].append(_time(backend, *case))
    dist.destroy_process_group()
    answers.put({case: samples[1:] for case, samples in found.items()})


def _time(backend: TorchBackend, collective: str, nbytes: int) -> tuple[float, float]:
    """Seconds of the processor and of the clock for one call."""
    own, both = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(RANKS * nbytes, dtype=torch.uint8)
    sent = torch.zeros_like(both)
    dist.barrier()
    processor, clock = time.process_time(), time.perf_counter()
    for _ in range(CALLS):
        work = backend.all_gather(LANE, both, own) if collective == "gather" else backend.exchange(LANE, both, sent)
        if work is not None:
            work.wait()
    return (time.process_time() - processor) / CALLS, (time.perf_counter() - clock) / CALLS


def table(results: list[Result]) -> str:
    lines = ["| collective | bytes received | us | us of the processor | ns of the processor per byte |", "|---|---:|---:|---:|---:|"]
    for one in results:
        micros = f"{1e6 * one.seconds:.0f} | {1e6 * one.processor_seconds:.0f}"
        lines.append(f"| {one.collective} | {one.nbytes} | {micros} | {1e9 * one.per_byte:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
