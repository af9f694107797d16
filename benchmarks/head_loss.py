"""Times head and loss, forward and backward, with whole logits and in chunks of tokens, and measures the peak memory of each.

    python -m benchmarks.head_loss --output benchmarks/results/head_loss.json

Prints a table in Markdown and writes the same as JSON. The ways take turns in every round, so that other load on the machine slows all of
them. Times are CPU seconds of this process on one thread, medians over rounds; the ratio is the median of the ratios within a round. Memory
is the peak of resident memory, minus what was resident before: hidden states, head and labels are not in it, their gradients are.

"gradients in forward" is the other way to have no whole logits: forward makes the gradients of each chunk while its logits are there. It
needs the weight of every token's loss in forward, and an fp32 sum of the head's gradient.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import report
from megatron_zpp.model.loss import head_loss
from megatron_zpp.model.loss_chunks import ranges
from megatron_zpp.monitor.memory import PROCESS_STATUS, max_resident_bytes, resident_bytes
from megatron_zpp.ops.device_kind import standing_for
from megatron_zpp.ops.softmax_reference import row_chunks
from megatron_zpp.training.plan.live_memory import Workspace, most_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIB = 2**20
RESET_PEAK = "5"  # proc(5), clear_refs


@dataclass(frozen=True)
class Inputs:
    """T tokens, H hidden size, V vocabulary. Every token's loss has the same weight."""

    hidden_TH: Tensor
    weight_VH: Tensor
    labels_T: Tensor

    @staticmethod
    def random(tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype) -> Inputs:
        generator = torch.Generator().manual_seed(1)
        hidden_TH = torch.randn(tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
        weight_VH = (torch.randn(vocabulary, hidden_size, generator=generator) * 0.02).to(dtype).requires_grad_()
        return Inputs(hidden_TH, weight_VH, torch.randint(vocabulary, (tokens,), generator=generator))

    def clear_gradients(self) -> None:
        self.hidden_TH.grad = self.weight_VH.grad = None


@dataclass(frozen=True)
class Way:
    """One way to compute head and loss. chunk_tokens: 0 for whole logits. planned_bytes: of the memory plan; None if it does not use it."""

    name: str
    chunk_tokens: int
    run: Callable[[], object]
    planned_bytes: int | None


@dataclass(frozen=True)
class Result:
    dtype: str
    vocabulary: int
    way: str
    chunk_tokens: int
    seconds: float
    of_whole: float
    peak_mib: float
    planned_mib: float | None


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    torch.set_num_threads(1)
    results = [result for case in _cases(options) for result in _measure(*case, options)]
    setting = {"threads": 1, "tokens": options.tokens, "hidden size": options.hidden_size}
    report("head_loss", arguments, setting, table(results), {"results": [asdict(result) for result in results]}, options.output)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times head and loss with whole logits and in chunks of tokens.")
    parser.add_argument("--tokens", type=int, default=2048, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[50304, 128256])
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--dtypes", choices=tuple(DTYPES), nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    return ((dtype, vocabulary) for dtype in options.dtypes for vocabulary in options.vocabularies)


def _measure(dtype: str, vocabulary: int, options: argparse.Namespace) -> Iterator[Result]:
    inputs = Inputs.random(options.tokens, options.hidden_size, vocabulary, DTYPES[dtype])
    ways = list(_ways(inputs, options.chunk_tokens))
    peaks = [_peak_bytes(way, inputs) for way in ways]  # also warms up
    rounds = [[_seconds(way, inputs) for way in ways] for _ in range(options.rounds)]
    for number, way in enumerate(ways):
        seconds = statistics.median(row[number] for row in rounds)
        of_whole = statistics.median(row[number] / row[0] for row in rounds)
        planned = None if way.planned_bytes is None else way.planned_bytes / MIB
        yield Result(dtype, vocabulary, way.name, way.chunk_tokens, seconds, of_whole, peaks[number] / MIB, planned)


def _ways(inputs: Inputs, chunk_tokens: list[int]) -> Iterator[Way]:
    for chunk in [0, *chunk_tokens]:
        run = partial(_chunked, inputs, chunk)
        yield Way("chunks" if chunk else "whole logits", chunk, run, _planned_bytes(inputs, chunk))
    middle = sorted(chunk_tokens)[len(chunk_tokens) // 2]
    yield Way("gradients in forward", middle, partial(_with_gradients_in_forward, inputs, middle), None)


def _chunked(inputs: Inputs, chunk_tokens: int) -> None:
    head_loss(inputs.hidden_TH, inputs.weight_VH, inputs.labels_T, chunk_tokens).mean().backward()


def _with_gradients_in_forward(inputs: Inputs, chunk_tokens: int) -> None:
    loss: Tensor = _GradientsInForward.apply(inputs.hidden_TH, inputs.weight_VH, inputs.labels_T, chunk_tokens)
    loss.backward()


class _GradientsInForward(torch.autograd.Function):
    """The mean loss, whose gradients forward makes, in the smallest possible number of passes over the logits of a chunk."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, chunk_tokens: int) -> Tensor:
        tokens = labels_T.shape[0]
        total = torch.zeros(())
        grad_hidden_TH, grad_weight_VH = torch.empty_like(hidden_TH), torch.zeros(weight_VH.shape)
        for chunk in ranges(tokens, chunk_tokens):
            logits_NV = F.linear(hidden_TH[chunk], weight_VH)
            for rows in row_chunks(logits_NV):
                labels_R = labels_T[chunk][rows, None]
                values_RV = logits_NV[rows].float()
                values_RV.sub_(values_RV.amax(dim=1, keepdim=True))
                shifted_label_R1 = values_RV.gather(1, labels_R)
                sum_R1 = values_RV.exp_().sum(dim=1, keepdim=True)
                total += (sum_R1.log() - shifted_label_R1).sum() / tokens
                values_RV.mul_(1 / (tokens * sum_R1)).scatter_add_(1, labels_R, torch.full(labels_R.shape, -1 / tokens))
                if values_RV.dtype != logits_NV.dtype:
                    logits_NV[rows] = values_RV
            grad_hidden_TH[chunk] = logits_NV @ weight_VH
            if weight_VH.dtype == torch.float32:
                grad_weight_VH.addmm_(logits_NV.T, hidden_TH[chunk])
            else:
                grad_weight_VH.add_(logits_NV.T @ hidden_TH[chunk])
        ctx.save_for_backward(grad_hidden_TH, grad_weight_VH)
        return total

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden_TH, grad_weight_VH = ctx.saved_tensors
        return grad_hidden_TH.mul_(grad_loss), grad_weight_VH.mul_(grad_loss).to(grad_hidden_TH.dtype), None, None


def _planned_bytes(inputs: Inputs, chunk_tokens: int) -> int:
    """Of a CPU, with the hidden states."""
    given = (inputs.hidden_TH, inputs.weight_VH, inputs.labels_T)
    hidden_TH, weight_VH, labels_T = (values.detach().to("meta").requires_grad_(values.requires_grad) for values in given)
    with standing_for("cpu"):
        made = most_bytes(lambda: head_loss(hidden_TH, weight_VH, labels_T, chunk_tokens).sum().backward(), Workspace(is_on_gpu=False))
    return hidden_TH.nbytes + made


def _peak_bytes(way: Way, inputs: Inputs) -> int:
    inputs.clear_gradients()
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator keeps would not be counted when it is used again
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    before = resident_bytes(PROCESS_STATUS)
    way.run()
    return max_resident_bytes(PROCESS_STATUS) - before


def _seconds(way: Way, inputs: Inputs) -> float:
    inputs.clear_gradients()
    start = time.process_time()
    way.run()
    return time.process_time() - start


def table(results: list[Result]) -> str:
    lines = [
        "| | vocabulary | | tokens of a chunk | CPU s | of whole logits | peak, MiB | planned, MiB |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    planned = "" if result.planned_mib is None else f"{result.planned_mib:.0f}"
    figures = f"{result.seconds:.2f} | {result.of_whole:.2f} | {result.peak_mib:.0f} | {planned}"
    return f"| {result.dtype} | {result.vocabulary} | {result.way} | {result.chunk_tokens or ''} | {figures} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
