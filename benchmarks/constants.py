"""Measures here what plans of time assume, and prints it beside the table of megatron_zpp/training/hardware.py.

    python -m benchmarks.constants

Codecs, sockets and AdamW are timed on one core, by benchmarks/quantization.py, sockets.py and host_adam.py; on a GPU also its codecs and
its link to the host. Other programs on the machine slow some of it; run it on a quiet one.
"""

from __future__ import annotations

import statistics
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks import quantization, sockets
from benchmarks.gpu import speed
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.outcome import Outcome
from benchmarks.host_adam import measure as measure_adam
from benchmarks.report import machine_text, origin
from megatron_zpp.ops import extension
from megatron_zpp.training.hardware import CONSTANTS
from testbed.session import RankPlace, Session

INTEGER_MEGABYTES, GAUSSIAN_MEGABYTES, GPU_MEGABYTES = 16, 1, 64
ADAM_FLAGS = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 64 --vocab-size 1000 --micro-batch-size 1 --mock-data "
ADAM_FLAGS += "--train-iters 10 --bf16 --optimizer-cpu-offload --zero-stage 1"
COPIED_BYTES = 256 * 2**20
SOCKET_ROUNDS = 15
Row = Mapping[str, Any]  # of a file of results


def main() -> int:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    if not extension.load():
        print(f"error: {extension.report()}", file=sys.stderr)
        return 1
    found = {("cpu", name): seconds for name, seconds in (of_core(_core_rows()) | _of_sockets()).items()}
    found["gpu", "AdamW on the host"] = _adam()
    if torch.cuda.is_available():
        found |= {("gpu", name): seconds for name, seconds in (of_gpu(_gpu_rows()) | {"host link": _host_link()}).items()}
    print(f"{machine_text(origin('constants.py', []))}\n\n{table(found)}")
    return 0


def of_core(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds per value of a codec on a core, from rows of benchmarks/quantization.py with integers and with Gaussian codes."""

    def of(op: str, codes: str, least: int = 0) -> list[float]:
        chosen = (row for row in rows if row["op"] == op and row.get("codes", "INT").startswith(codes) and row["megabytes"] >= least)
        return [2e-9 / row["gigabytes_per_second"] for row in chosen]

    def integers(op: str, members: int = 1) -> float:
        return statistics.median(of(op, "INT", INTEGER_MEGABYTES)) / members

    def gaussian(op: str, rounds: str) -> float:
        return statistics.mean(of(f"{op}, {rounds}", "Gaussian"))

    rotated = statistics.mean(gaussian(op, "2 rounds") - gaussian(op, "1 round") for op in ("encode", "decode to bf16"))
    return {
        "encoded": integers("encode"),
        "decoded": integers("decode to bf16"),
        "summed": statistics.mean(integers(f"decode, add mean of {members}", members) for members in (2, 4)),
        "gaussian_encoded": gaussian("encode", "1 round") - rotated,
        "gaussian_decoded": gaussian("decode to bf16", "1 round") - rotated,
        "rotated": rotated,
    }


def of_gpu(kernels: Iterable[Row]) -> dict[str, float]:
    """Seconds per value of a codec on a GPU, from what benchmarks/gpu/speed.py finds."""
    rows = [row for row in kernels if row["megabytes"] == GPU_MEGABYTES]

    def per_value(op: str, codes: str) -> float:
        chosen = (row["microseconds"] for row in rows if row["op"] == op and row["codes"].startswith(codes))
        return statistics.mean(chosen) * 1e-6 / (GPU_MEGABYTES * 2**20 / 2)

    rotated = per_value("encode rotated bf16", "INT") - per_value("encode bf16", "INT")
    rounds = statistics.mean((1, 2))  # of the two Gaussian codes that are timed
    return {
        "encoded": per_value("encode bf16", "INT"),
        "decoded": per_value("decode to bf16", "INT"),
        "summed": per_value("decode, add mean of 2", "INT") / 2,
        "gaussian_encoded": per_value("encode bf16", "Gaussian") - rounds * rotated,
        "gaussian_decoded": per_value("decode to bf16", "Gaussian") - rounds * rotated,
        "rotated": rotated,
    }


def of_sockets(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds per byte and per collective, from rows of benchmarks/sockets.py."""
    results = [sockets.Result(**row) for row in rows]
    per_byte = {name: sockets.seconds_per_byte(results, op) for name, op in (("gathered", "gather"), ("exchanged", "exchange"))}
    return {**per_byte, "collective": sockets.seconds_per_collective(results)}


def _core_rows() -> list[Row]:
    options = Namespace(threads=1, block_numel=256, rounds=7, reference_rounds=1, options=False)
    sizes = ((INTEGER_MEGABYTES, False), (GAUSSIAN_MEGABYTES, True))
    measured = (quantization._measure_size(size, Namespace(**vars(options), gaussian=is_gaussian)) for size, is_gaussian in sizes)
    return [asdict(result) for results in measured for result in results]


def _of_sockets() -> dict[str, float]:
    return of_sockets(asdict(result) for result in sockets.measure(SOCKET_ROUNDS))


def _adam() -> float:
    """Seconds per value on one core."""
    session = Session(ADAM_FLAGS, RankPlace.alone(torch.device("cpu")))
    result = next(result for result in measure_adam(session.engine, 5) if result.way == "units")
    session.close()
    return result.seconds / result.elements


def _gpu_rows() -> list[Row]:
    return [asdict(result) for result in speed._measure_size(GPU_MEGABYTES, Deadline(300), Outcome())]


def _host_link() -> float:
    """Seconds per byte of the slower direction."""
    on_host, on_device = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True), torch.empty(COPIED_BYTES, dtype=torch.uint8).cuda()
    copies = partial(on_host.copy_, on_device, non_blocking=True), partial(on_device.copy_, on_host, non_blocking=True)
    return max(map(speed._seconds, copies)) / COPIED_BYTES


def table(found: Mapping[tuple[str, str], float]) -> str:
    lines = ["| device | constant | of a | assumed, ns | measured here, ns | from |", "|---|---|---|---:|---:|---|"]
    for constant in CONSTANTS:
        here = found.get((constant.device, constant.name))
        measured = "-" if here is None else f"{1e9 * here:.4g}"
        lines.append(
            f"| {constant.device} | {constant.name} | {constant.of} | {1e9 * constant.seconds:.4g} | {measured} | {constant.source} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
