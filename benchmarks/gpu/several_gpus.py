"""One rank per GPU: the rates of gathers and exchanges, a training step, and its stalls, with several limits of NCCL's thread blocks."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.files import read_json
from benchmarks.gpu.outcome import NotDone, Outcome
from benchmarks.gpu.rank_processes import ONE_GPU_EACH, Ended, in_words, ran_out_of_time, run_ranks
from benchmarks.gpu.training import FLAGS, GPU_SHAPE

MOST_RANKS = 8
CTA_LIMITS = ("", "4", "8", "16")  # of NCCL_MAX_CTAS; empty: NCCL's own choice
SECONDS_PER_LIMIT = 20.0


def run(time: Deadline, outcome: Outcome) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < 2:
        raise NotDone(f"one rank per GPU needs 2 GPUs or more, and this machine has {gpus}")
    measure(time, outcome, min(gpus, MOST_RANKS), f"{GPU_SHAPE} {FLAGS}", CTA_LIMITS)


def measure(time: Deadline, outcome: Outcome, world_size: int, flags: str, limits: tuple[str, ...]) -> None:
    """Measures with each limit of thread blocks."""
    for limit in limits:
        name = f"NCCL_MAX_CTAS={limit}" if limit else "NCCL's own number of thread blocks"
        if not time.has(SECONDS_PER_LIMIT):
            outcome.ran_late(name)
            continue
        found, ended = _measured(time, world_size, f"{flags} --ranks-per-node {world_size}", {"NCCL_MAX_CTAS": limit} if limit else {})
        if ran_out_of_time(ended):
            outcome.ran_late(f"the end of {world_size} ranks with {name}")
            continue
        if not outcome.check(f"{world_size} ranks train with {name}", holds=found is not None):
            outcome.say(*in_words(ended))
            continue
        outcome.measure(**{name: found})
        outcome.say(*_lines(name, found))


def _measured(time: Deadline, world_size: int, flags: str, environment: dict[str, str]) -> tuple[Any, list[Ended]]:
    """What rank 0 has written, None unless all ranks have ended well; and how they ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "found.json"
        words = ["-m", "benchmarks.gpu.link_program", str(file), *flags.split()]
        ended = run_ranks(words, world_size, ONE_GPU_EACH, folder, time, environment)
        return (read_json(file) if all(end.code == 0 for end in ended) else None), ended


def _lines(name: str, found: dict[str, Any]) -> list[str]:
    rates = [
        f"    {rate['megabytes']:5.0f} MB: gather {rate['gather']:.1f} GB/s, exchange {rate['exchange']:.1f} GB/s"
        for rate in found["rates"]
    ]
    stalls = found.get("stalls_seconds_per_step", {})
    return [
        f"{name}: {statistics.median(found['step_seconds']) * 1e3:.1f} ms per step; computation stands still for "
        f"{sum(stalls.values()) * 1e3:.2f} ms of it",
        *rates,
        *(f"    {seconds * 1e3:8.3f} ms  {where}" for where, seconds in stalls.items()),
    ]
