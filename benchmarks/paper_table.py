"""Compares the time model of tools/plan_run.py with the throughput that the ZeRO++ paper published (arXiv 2306.10209).

    python -m benchmarks.paper_table

The paper's world is 384 V100 as 24 nodes of 16, each node with 1, 2, 4 or 8 InfiniBand ports of 100 Gbit/s. The published figures are
TFLOPS per GPU, which count 8 operations per parameter and token; they were read from the authors' bar charts, with an error of
about 0.15. The shapes of the models are not published; those assumed here have the same number of parameters. The published times show no
overlap of communication and computation, so the model assumes none.

Two kinds of constants are fitted to ZeRO-3's bars alone: the rate of a GPU, and the rate of a node's link for each number of ports. From
these the model predicts ZeRO++'s bars: once with codecs that cost nothing, and once with one more constant, the time of a codec per value,
which is fitted to ZeRO++'s bars.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.training.members import MEMBERS, Member, PlannedWorld
from megatron_zpp.training.plan.clock import StepTime
from megatron_zpp.training.plan.machine import CodecSpeed, LinkSpeed, Machine, Overlap
from megatron_zpp.training.run_plan import RunPlan, plan_run

WORLD = PlannedWorld(nodes=24, ranks_per_node=16, is_on_gpu=True)
PADDED_VOCAB = 50304
SHAPES = {"18B": (40, 6144, 32), "49B": (60, 8192, 64), "91B": (112, 8192, 64), "138B": (76, 12288, 96)}  # layers, hidden, heads
SAMPLE_TOKENS = 512
INTRA_GIGABYTES = 100.0  # what NVLink of a DGX-2 reaches in practice; results hardly depend on it
ZERO3, ZEROPP = (next(member for member in MEMBERS if member.name == name) for name in ("ZeRO-3", "ZeRO++"))


@dataclass(frozen=True)
class Cell:
    """A published pair of bars: TFLOPS per GPU."""

    ports: int
    thousand_tokens: int
    model: str
    zero3: float
    zeropp: float


PUBLISHED = (
    Cell(1, 1, "18B", 14.2, 30.6),
    Cell(1, 1, "49B", 11.35, 22.0),
    Cell(1, 1, "91B", 11.35, 22.0),
    Cell(1, 1, "138B", 11.35, 21.9),
    Cell(1, 2, "18B", 26.0, 46.4),
    Cell(1, 2, "49B", 20.2, 38.2),
    Cell(1, 2, "91B", 20.0, 38.0),
    Cell(1, 2, "138B", 20.0, 37.9),
    Cell(4, 1, "18B", 24.8, 35.3),
    Cell(4, 1, "49B", 22.8, 36.5),
    Cell(4, 1, "91B", 22.7, 36.5),
    Cell(4, 1, "138B", 22.7, 36.2),
    Cell(4, 2, "18B", 40.2, 52.7),
    Cell(4, 2, "49B", 36.2, 50.8),
    Cell(4, 2, "91B", 36.0, 50.8),
    Cell(4, 2, "138B", 35.9, 50.6),
    Cell(2, 2, "18B", 37.3, 49.7),
    Cell(2, 2, "138B", 31.9, 47.8),
    Cell(8, 2, "18B", 47.3, 53.8),
    Cell(8, 2, "138B", 47.6, 55.5),
)
PORTS = (1, 2, 4, 8)
# From the log in DeepSpeed's tutorial: 4 nodes of 16 V100, 18B, one sample of 512 tokens. The rate between nodes is not stated.
TUTORIAL_WORLD = PlannedWorld(nodes=4, ranks_per_node=16, is_on_gpu=True)
TUTORIAL_SECONDS = {"ZeRO-3": 9.9559, "ZeRO++": 3.6806}


@dataclass(frozen=True)
class Parts:
    """The parts of a step without overlap; its time is their sum. operations: of one rank. codec_values: values encoded or decoded."""

    operations: float
    node_bytes: float
    other_seconds: float
    codec_values: float
    published_operations: float

    def seconds(self, teraflops: float, node_bytes_per_second: float, codec_seconds: float = 0.0) -> float:
        links = self.node_bytes / node_bytes_per_second + self.other_seconds
        return self.operations / (teraflops * 1e12) + links + self.codec_values * codec_seconds

    def published_teraflops(self, seconds: float) -> float:
        return self.published_operations / seconds / 1e12


def parts_of(model: str, samples: int, member: Member, world: PlannedWorld = WORLD) -> Parts:
    layers, hidden, heads = SHAPES[model]
    flags = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {SAMPLE_TOKENS} --fp16 "
    flags += "--loss-chunk-tokens 0 "  # as in the paper
    plan = plan_run(parse_flags(f"{flags} --micro-batch-size {samples} --checkpoint-activations".split()), member, world, PADDED_VOCAB)
    time = _time(plan)
    parameters = 12 * layers * hidden * hidden + (PADDED_VOCAB + SAMPLE_TOKENS) * hidden
    tokens = samples * SAMPLE_TOKENS
    # The published system recomputed whole layers. torch's checkpoint ends before the last product of a layer.
    operations = time.computing + layers * 2 * tokens * 4 * hidden * hidden
    return Parts(operations, time.inter_link, time.intra_link, time.codecs, 8 * parameters * tokens)


def _time(plan: RunPlan) -> StepTime:
    """The parts of a step if an operation, a byte between nodes and a value of a codec take one second each."""
    machine = Machine(LinkSpeed(1.0), LinkSpeed(INTRA_GIGABYTES * 1e9), CodecSpeed(1.0, 1.0, 1.0), Overlap.NONE, flops_per_second=1.0)
    return plan.time(machine)


@dataclass(frozen=True)
class Fit:
    """Constants in TFLOP/s, bytes per second by number of ports, and seconds per value."""

    teraflops: float
    node_bytes_per_second: dict[int, float]
    codec_seconds: float


def fit(zero3: dict[Cell, Parts], zeropp: dict[Cell, Parts]) -> Fit:
    """The constants with the least squares of relative errors: a linear problem, as a step's time is linear in the inverse rates."""
    rows, targets = [], []
    for cell, parts in zero3.items():
        seconds = parts.published_operations / (cell.zero3 * 1e12)
        rows.append([parts.operations / 1e12 / seconds, *(parts.node_bytes / 1e9 / seconds * (ports == cell.ports) for ports in PORTS)])
        targets.append(1 - parts.other_seconds / seconds)
    inverse, *links = np.linalg.lstsq(np.array(rows), np.array(targets), rcond=None)[0]
    rates = {ports: 1e9 / link for ports, link in zip(PORTS, links, strict=True)}
    shares, lacking = [], []
    for cell, parts in zeropp.items():
        seconds = parts.published_operations / (cell.zeropp * 1e12)
        shares.append(parts.codec_values / seconds)
        lacking.append(1 - parts.seconds(1 / inverse, rates[cell.ports]) / seconds)
    return Fit(1 / inverse, rates, float(np.dot(shares, lacking) / np.dot(shares, shares)))


def table(found: Fit, zero3: dict[Cell, Parts], zeropp: dict[Cell, Parts]) -> list[str]:
    """One line per published pair, then the mean and largest errors of each prediction."""
    header = "| ports | tokens | model | ZeRO-3 | fitted | ZeRO++ | codecs free | codecs fitted | speedup | codecs free | codecs fitted |"
    lines = [header, "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    errors: dict[str, list[float]] = {"ZeRO-3": [], "ZeRO++, codecs free": [], "ZeRO++, codecs fitted": [], "speedup, codecs fitted": []}
    for cell in PUBLISHED:
        rate = found.node_bytes_per_second[cell.ports]
        base = zero3[cell].published_teraflops(zero3[cell].seconds(found.teraflops, rate))
        free = zeropp[cell].published_teraflops(zeropp[cell].seconds(found.teraflops, rate))
        coded = zeropp[cell].published_teraflops(zeropp[cell].seconds(found.teraflops, rate, found.codec_seconds))
        published = cell.zeropp / cell.zero3
        for name, ratio in zip(errors, (base / cell.zero3, free / cell.zeropp, coded / cell.zeropp, coded / base / published), strict=True):
            errors[name].append(ratio - 1)
        cells = [f"{cell.ports}", f"{cell.thousand_tokens}K", cell.model, f"{cell.zero3}", f"{base:.1f} ({base / cell.zero3 - 1:+.0%})"]
        cells += [f"{cell.zeropp}", f"{free:.1f} ({free / cell.zeropp - 1:+.0%})", f"{coded:.1f} ({coded / cell.zeropp - 1:+.0%})"]
        cells += [f"{published:.2f}", f"{free / base:.2f}", f"{coded / base:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for name, values in errors.items():
        lines.append(f"- {name}: mean error {np.mean(np.abs(values)):.1%}, largest {max(values, key=abs):+.1%}")
    return lines


def tutorial(found: Fit) -> str:
    """One sentence about the tutorial's log: the rate between nodes that its ZeRO-3 time implies, and ZeRO++ predicted with that rate."""
    zero3, zeropp = (parts_of("18B", 1, member, TUTORIAL_WORLD) for member in (ZERO3, ZEROPP))
    rate = zero3.node_bytes / (TUTORIAL_SECONDS["ZeRO-3"] - zero3.seconds(found.teraflops, float("inf")))
    seconds, published = zeropp.seconds(found.teraflops, rate, found.codec_seconds), TUTORIAL_SECONDS["ZeRO++"]
    return (
        f"The tutorial's log, 18B on 4 nodes of 16: ZeRO-3's {TUTORIAL_SECONDS['ZeRO-3']} s per iteration imply {rate / 1e9:.1f} GB/s "
        f"into a node; ZeRO++ is then predicted to take {seconds:.2f} s and took {published} ({seconds / published - 1:+.0%})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="MD", help="file to write the table to")
    options = parser.parse_args()
    samples = {thousands: thousands * 1024 // SAMPLE_TOKENS for thousands in (1, 2)}
    zero3, zeropp = (
        {cell: parts_of(cell.model, samples[cell.thousand_tokens], member) for cell in PUBLISHED} for member in (ZERO3, ZEROPP)
    )
    found = fit(zero3, zeropp)
    rates = ", ".join(f"{rate / 1e9:.1f} GB/s on {ports}" for ports, rate in found.node_bytes_per_second.items())
    text = "\n".join(
        [
            "TFLOPS per GPU as published (8 operations per parameter and token), and as the time model computes them.",
            f"Fitted: {found.teraflops:.1f} TFLOP/s per GPU; into a node {rates} ports; codecs {found.codec_seconds * 1e12:.1f} ps/value.",
            "",
            *table(found, zero3, zeropp),
            "",
            tutorial(found),
        ]
    )
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
