"""Times hidden dropout, forward and backward, beside torch's dropout on this machine's CPU, and counts what both keep for backward.

    python -m benchmarks.dropout --threads 1

Prints a table in Markdown and writes the same as JSON. A case is the output of a block of a known model: samples x tokens x channels. The
two take turns in every round, so that other load on the machine slows both, and times are those of the processor, not of the clock. The
ratio is a median over rounds. "memcpy" copies the values once; dropout reads and writes them twice, in forward and in backward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import report
from megatron_zpp.ops import extension
from megatron_zpp.ops.dropout import dropout, mask_start

SHAPES = {"GPT-2 small": (4, 1024, 768), "GPT-2 XL": (2, 1024, 1600), "Llama 3.1 8B": (1, 2048, 4096)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
P = 0.1
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Result:
    """Medians of processor time. share_of_torch: side by side. kept_bytes: for backward, per element."""

    block: str
    dtype: str
    megabytes: float
    milliseconds: float
    torch_milliseconds: float
    share_of_torch: float
    memcpy_milliseconds: float
    kept_bytes: float
    torch_kept_bytes: float


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    if not extension.load():
        print(f"error: {extension.report()}", file=sys.stderr)
        return 1
    results = [_measure(block, shape, dtype, options.rounds) for block, shape in SHAPES.items() for dtype in DTYPES]
    setting = {"threads": options.threads}
    report("dropout", arguments, setting, table(results), {"results": [asdict(result) for result in results]}, options.output)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times hidden dropout, forward and backward, beside torch's dropout.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


def _measure(block: str, shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> Result:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    start = mask_start(1, 0)
    calls: tuple[Call, Call] = (lambda some: dropout(some, start, P), lambda some: F.dropout(some, P))
    grad = torch.ones_like(values)
    # The first round is not counted: memory has to be allocated.
    seconds = [tuple(_seconds(call, values, grad) for call in calls) for _ in range(rounds + 1)][1:]
    copies = [_copy_seconds(values.detach()) for _ in range(rounds + 1)][1:]
    ours, torchs = (statistics.median(column) * 1e3 for column in zip(*seconds, strict=True))
    share = statistics.median(one / other for one, other in seconds)
    kept, torch_kept = (_kept_bytes(call, values) / values.numel() for call in calls)
    megabytes = values.nbytes / 2**20
    memcpy = statistics.median(copies) * 1e3
    return Result(block, str(dtype).removeprefix("torch."), megabytes, ours, torchs, share, memcpy, kept, torch_kept)


def _seconds(call: Call, values: Tensor, grad: Tensor) -> float:
    """Of a forward and a backward."""
    start = time.process_time()
    torch.autograd.grad(call(values), values, grad)
    return time.process_time() - start


def _copy_seconds(values: Tensor) -> float:
    start = time.process_time()
    values.clone()
    return time.process_time() - start


def _kept_bytes(call: Call, values: Tensor) -> int:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(values)
    return sum(tensor.nbytes for tensor in kept)


def table(results: list[Result]) -> str:
    lines = [
        "| block | dtype | MB | ours ms | torch ms | share of torch | memcpy ms | kept B per element | torch keeps |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in results:
        lines.append(
            f"| {one.block} | {one.dtype} | {one.megabytes:.0f} | {one.milliseconds:.1f} | {one.torch_milliseconds:.1f} "
            f"| {one.share_of_torch:.1%} | {one.memcpy_milliseconds:.1f} | {one.kept_bytes:g} | {one.torch_kept_bytes:g} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
