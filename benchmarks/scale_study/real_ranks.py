"""Runs of the training script with many real ranks on this machine: memory of the host per rank."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.report import ROOT

RANKS = (8, 16, 32, 64)
RANKS_PER_NODE = 8
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --mock-data --micro-batch-size 1 "
    "--train-iters 3 --log-interval 1 --lr 1e-3 --zero-stage 3 --distributed-backend gloo --num-workers 0 --eval-iters 0 "
    "--ranks-per-node {ranks_per_node} --global-batch-size {ranks}"
)
PEAK = re.compile(r"^peak (\d+)$", re.MULTILINE)
LONGEST_SECONDS = 900.0


@dataclass(frozen=True)
class RealRanks:
    """peak_mib: the most memory of the host that a rank has had, its median over ranks; shared pages of libraries count on each.

    seconds: of the whole run.
    """

    ranks: int
    peak_mib: float
    seconds: float


def measure() -> list[RealRanks]:
    return [measured(ranks) for ranks in RANKS]


def mib_per_peer(results: list[RealRanks]) -> float:
    """Of the line through the least and the most ranks."""
    return (results[-1].peak_mib - results[0].peak_mib) / (results[-1].ranks - results[0].ranks)


def measured(ranks: int) -> RealRanks:
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port  # free again when it has gone
    flags = MODEL.format(ranks_per_node=RANKS_PER_NODE, ranks=ranks).split()
    begun = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale_study.world_rank", *flags],
            cwd=ROOT,
            env={**os.environ, **_environment(rank, ranks, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=LONGEST_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    peaks = [PEAK.search(text) for text in printed]
    if any(peak is None for peak in peaks):
        raise RuntimeError(next(text for text, peak in zip(printed, peaks, strict=True) if peak is None))
    mib = [int(peak[1]) / 1024 for peak in peaks if peak is not None]
    return RealRanks(ranks, statistics.median(mib), time.monotonic() - begun)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % RANKS_PER_NODE),
        "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
