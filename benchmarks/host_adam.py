"""Times AdamW on the host, where an offloaded optimizer updates unit after unit, beside torch's fused AdamW over one tensor.

    python -m benchmarks.host_adam --threads 1 --output benchmarks/results/host_adam.json

Prints a table in Markdown and writes the same as JSON. The ways take turns in every round, so that other load on the machine slows all of
them; times are medians over rounds, and the share is the median of the shares within a round: 1 is as fast as torch's AdamW that does the
same. Both update as many elements. "clipped" multiplies the gradients by a factor first, as a step whose norm is too large does. "encoded"
also makes the payloads in which the weights go up to the device; torch's does not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.report import report
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.optimizer import Update
from testbed.session import RankPlace, Session

LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01
FACTOR = 0.999


@dataclass(frozen=True)
class Result:
    """seconds: of one update of all elements. share: speed, relative to torch's on one tensor, clipped or not as this way is."""

    way: str
    elements: int
    seconds: float
    share: float


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    session = Session(_flags(options), RankPlace.alone(torch.device("cpu")))
    results = measure(session.engine, options.rounds)
    session.close()
    setting = {"threads": options.threads, "units": len(session.engine.units)}
    report("host_adam", arguments, setting, table(results), {"results": [asdict(result) for result in results]}, options.output)
    return 0


def measure(engine: ZeroEngine, rounds: int) -> list[Result]:
    """One result for each way, torch's first. engine: of an offloaded optimizer, in a world of one rank."""
    elements = sum(unit.main_weight.numel() for unit in engine.units)
    plain, clipped = "torch, one tensor", "torch, one tensor, clipped"
    torch_update = partial(_torch_update, *_torch_adam(elements))
    ways: dict[str, Callable[[], None]] = {
        plain: partial(torch_update, 1.0),
        clipped: partial(torch_update, FACTOR),
        "units": partial(_update_units, engine, 1.0),
        "units, clipped": partial(_update_units, engine, FACTOR),
        "units, clipped and encoded": partial(_update_and_encode, engine, FACTOR),
    }
    names = list(ways)
    for update in ways.values():
        update()
    seconds = [[_seconds(update) for update in ways.values()] for _ in range(rounds)]
    results = []
    for index, way in enumerate(names):
        like = names.index(clipped if "clipped" in way else plain)
        share = statistics.median(row[like] / row[index] for row in seconds)
        results.append(Result(way, elements, statistics.median(row[index] for row in seconds), share))
    return results


def _torch_adam(elements: int) -> tuple[torch.optim.AdamW, Tensor]:
    """torch's fused AdamW over one tensor, and its gradient."""
    parameter, gradient = nn.Parameter(torch.ones(elements)), torch.full((elements,), 1e-3)
    parameter.grad = gradient
    return torch.optim.AdamW([parameter], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True), gradient


def _torch_update(optimizer: torch.optim.AdamW, gradient: Tensor, factor: float) -> None:
    if factor != 1.0:
        gradient.mul_(factor)
    optimizer.step()


def _update_units(engine: ZeroEngine, factor: float) -> None:
    for group in range(len(engine.units)):
        engine.optimizer.update(group, Update(LEARNING_RATE, WEIGHT_DECAY, factor))


def _update_and_encode(engine: ZeroEngine, factor: float) -> None:
    _update_units(engine, factor)
    for unit in engine.units:
        _encode(unit.main_weight)


def _encode(main_weight: Tensor) -> None:
    """What the codec of 16-bit weights does."""
    torch.empty_like(main_weight, dtype=torch.bfloat16).copy_(main_weight)


def _seconds(update: Callable[[], None]) -> float:
    start = time.perf_counter()
    update()
    return time.perf_counter() - start


def table(results: list[Result]) -> str:
    lines = ["| way | elements | ms | million elements per second | share of torch |", "| --- | ---: | ---: | ---: | ---: |"]
    for result in results:
        speed = result.elements / result.seconds / 1e6
        lines.append(f"| {result.way} | {result.elements} | {1e3 * result.seconds:.1f} | {speed:.0f} | {result.share:.2f} |")
    return "\n".join(lines)


def _flags(options: argparse.Namespace) -> str:
    return (
        f"--num-layers {options.layers} --hidden-size {options.hidden_size} --num-attention-heads 8 --seq-length 64 --vocab-size 1000 "
        "--bf16 --zero-stage 2 --optimizer-cpu-offload --mock-data --train-iters 1"
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times AdamW on the host beside torch's.")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
