"""Measures, without a GPU, the memory that torch allocates for a training step on GPUs, and how often the host calls them.

    python -m benchmarks.gpu_host_path --output benchmarks/results/gpu_host_path.json

Ranks are processes with fake GPUs (fake_gpus.py), so torch's allocator, streams and NCCL groups do what they do with real ones, while
kernels, products and collectives do nothing. A table has the peak of allocated and of reserved memory on the rank that needs most, beside
the plan without CUDA's context and NCCL's buffers, which no fake GPU has. Another has the calls of one step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.fake_gpu.counts import COLLECTIVE, EVENT, HOST_WAIT, LAUNCH, PRODUCT, STREAM_WAIT
from benchmarks.fake_gpu.libraries import fake_gpus
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.files import read_json
from benchmarks.gpu.rank_processes import ONE_GPU_EACH, in_words, run_ranks
from benchmarks.report import ROOT, report

GIB = 2**30
COMMON = "--bf16 --mock-data --train-iters 100 --attention-dropout 0 --hidden-dropout 0 --attention-backend flash --vocab-size 50257"
LARGE = "--num-layers 18 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4"
LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
)
MEDIUM = "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4"
SECONDS_PER_RUN = 900.0
GIBIBYTES, CAPABILITY = 140, "9.0"


@dataclass(frozen=True)
class Case:
    """A run to measure. microbatches: of a step. flags: beside those of the shape."""

    name: str
    flags: str
    nodes: int = 2
    ranks_per_node: int = 2
    microbatches: int = 1
    shape: str = MEDIUM

    @property
    def all_flags(self) -> str:
        common = COMMON.replace("--bf16 ", "") if "--fp16" in self.flags else COMMON
        return f"{self.shape} {common} {self.flags} --ranks-per-node {self.ranks_per_node}"


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SIX_RECOMPUTED = "--recompute-granularity full --recompute-method block --recompute-num-layers 6"
PLAIN_PRODUCTS = "--attention-backend unfused"
CASES = (
    Case("1.0 billion parameters, one GPU", "--zero-stage 3", 1, 1, shape=LARGE),
    Case("1.0 billion parameters, one GPU, 4 micro-batches", "--zero-stage 3", 1, 1, 4, LARGE),
    Case("6.9 billion parameters, stage 3", "--zero-stage 3", 2, 4, shape=LLAMA),
    Case("6.9 billion parameters, ZeRO++", "--zeropp paper", 2, 4, shape=LLAMA),
    Case("6.9 billion parameters, lean", "--zeropp lean", 2, 4, shape=LLAMA),
    Case("stage 0", "--zero-stage 0"),
    Case("stage 1", "--zero-stage 1"),
    Case("stage 2", "--zero-stage 2"),
    Case("stage 3", "--zero-stage 3"),
    Case("stage 3, 4 micro-batches", "--zero-stage 3", microbatches=4),
    Case("stage 3, fp16", "--zero-stage 3 --fp16"),
    Case("ZeRO++", "--zeropp paper"),
    Case("ZeRO++, 4 micro-batches", "--zeropp paper", microbatches=4),
    Case("lean", "--zeropp lean"),
    Case("lean, 4 micro-batches", "--zeropp lean", microbatches=4),
    Case("stage 3, blocks recomputed", f"--zero-stage 3 {RECOMPUTED}"),
    Case("stage 3, 6 of 12 blocks recomputed", f"--zero-stage 3 {SIX_RECOMPUTED}"),
    Case("stage 3, blocks recomputed, their inputs on the host", f"--zero-stage 3 {RECOMPUTED} --checkpoint-in-cpu"),
    Case("stage 3, optimizer on the host", "--zero-stage 3 --optimizer-cpu-offload"),
    Case("stage 3, attention as plain products", f"--zero-stage 3 {PLAIN_PRODUCTS}"),
    Case("stage 3, attention as plain products with dropout", f"--zero-stage 3 {PLAIN_PRODUCTS} --attention-dropout 0.1"),
    Case("stage 3, two tensor ranks", "--zero-stage 3 --tensor-model-parallel-size 2 --sequence-parallel"),
    Case("stage 3, two context ranks", "--zero-stage 3 --context-parallel-size 2"),
)


@dataclass(frozen=True)
class Measured:
    """The rank of a run that needs most. Bytes are those of the device; calls: how often the host called it in one step, by kind.

    calls_in_backward: of these, those of forward and backward.
    """

    name: str
    ranks: str
    peak_bytes: int
    reserved_bytes: int
    planned_bytes: int
    units: int
    microbatches: int
    calls_in_backward: Mapping[str, int]
    calls: Mapping[str, int]


def main() -> None:
    options = _parser().parse_args()
    try:
        build_kernels()
        wanted = [case for case in CASES if not options.cases or case.name in options.cases]
        measured = [run(case) for case in wanted]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    text = "\n".join([*memory_table(measured), "", *calls_table(measured)])
    about = {
        "model": {"common": COMMON, "1.0 billion parameters": LARGE, "6.9 billion parameters": LLAMA, "others": MEDIUM},
        "gpu": f"fake, of capability {CAPABILITY}, {GIBIBYTES} GiB, CUDA {torch.version.cuda}",
    }
    report("gpu_host_path", sys.argv[1:], about, text, {"measured": [asdict(one) for one in measured]}, options.output)


def build_kernels() -> None:
    """Builds the kernels for a fake GPU, unless they are built. Raises ValueError if that fails."""
    environment = {**os.environ, **fake_gpus(1, GIBIBYTES, CAPABILITY)}
    ended = subprocess.run([sys.executable, "-m", "megatron_zpp.ops.extension"], cwd=ROOT, env=environment, check=False)
    if ended.returncode != 0:
        raise ValueError("the kernels cannot be built; see the messages above.")


def run(case: Case) -> Measured:
    """Raises ValueError if fake GPUs cannot be made, or a rank fails."""
    world_size = case.nodes * case.ranks_per_node
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [
            "-m",
            "benchmarks.gpu_host_path_rank",
            str(folder / "found"),
            str(case.ranks_per_node),
            str(case.microbatches),
            *case.all_flags.split(),
        ]
        environment = fake_gpus(world_size, GIBIBYTES, CAPABILITY)
        ended = run_ranks(words, world_size, ONE_GPU_EACH, folder, Deadline(SECONDS_PER_RUN), environment)
        if any(end.code != 0 for end in ended):
            raise ValueError("\n".join([f"{case.name} failed", *in_words([end for end in ended if end.code != 0][:1])]))
        found = [read_json(folder / f"found.{rank}.json") for rank in range(world_size)]
    most: dict[str, Any] = max(found, key=lambda of_rank: of_rank["peak_bytes"])
    return Measured(case.name, f"{case.nodes} x {case.ranks_per_node}", **most)


def memory_table(measured: Sequence[Measured]) -> list[str]:
    rows = ["| run | nodes x ranks | peak, GiB | plan, GiB | plan / peak | reserved, GiB |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for one in measured:
        sizes = f"{one.peak_bytes / GIB:.2f} | {one.planned_bytes / GIB:.2f} | {one.planned_bytes / one.peak_bytes:.3f}"
        rows.append(f"| {one.name} | {one.ranks} | {sizes} | {one.reserved_bytes / GIB:.2f} |")
    return rows


def calls_table(measured: Sequence[Measured]) -> list[str]:
    """Of one step; launches of kernels are without matrix products."""
    kinds = {"kernels": LAUNCH, "products": PRODUCT, "events": EVENT, "waits of streams": STREAM_WAIT, "waits of the host": HOST_WAIT}
    rows = [
        f"| run | {' | '.join(kinds)} | collectives | kernels per unit and micro-batch, in forward and backward |",
        f"| --- | {'---: | ' * len(kinds)}---: | ---: |",
    ]
    for one in measured:
        collectives = sum(number for name, number in one.calls.items() if name.startswith(COLLECTIVE))
        per_unit = one.calls_in_backward.get(LAUNCH, 0) / (one.units * one.microbatches)
        numbers = " | ".join(str(one.calls.get(kind, 0)) for kind in kinds.values())
        rows.append(f"| {one.name} | {numbers} | {collectives} | {per_unit:.1f} |")
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=[case.name for case in CASES], metavar="NAME", help="runs of the table (default: all)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write the figures to")
    return parser


if __name__ == "__main__":
    main()
