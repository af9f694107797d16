"""Runs of the training script with many real ranks on this machine: memory of the host per rank. Run as a program, it is such a rank."""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.rank_processes import ONE_GPU_EACH, in_words, run_ranks
from megatron_zpp.monitor.memory import max_resident_bytes
from pretrain_zeropp_gpt import main

RANKS = (8, 16, 32, 64)
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --mock-data --micro-batch-size 1 "
    "--train-iters 3 --log-interval 1 --lr 1e-3 --zero-stage 3 --distributed-backend gloo --num-workers 0 --eval-iters 0 "
    "--ranks-per-node 8 --global-batch-size {ranks}"
)
PEAK = "peak of this rank, in bytes: "
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
    words = ["-m", "benchmarks.scale_study.real_ranks", *MODEL.format(ranks=ranks).split()]
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(words, ranks, ONE_GPU_EACH, Path(folder), Deadline(LONGEST_SECONDS))
    if any(end.code != 0 for end in ended):
        raise RuntimeError("\n".join(in_words(ended)))
    peaks = [int(end.said[-1].removeprefix(PEAK)) for end in ended]
    return RealRanks(ranks, statistics.median(peaks) / 2**20, max(end.seconds for end in ended))


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    print(f"\n{PEAK}{max_resident_bytes(Path('/proc/self/status'))}", flush=True)
    sys.exit(exit_code)
