"""Times the ops of quantization on this machine's CPU, beside a memcpy of the same bytes and beside the plain-torch reference.

    python -m benchmarks.quantization --threads 1
    python -m benchmarks.quantization --threads 1 --gaussian

Prints a table in Markdown and writes the same as JSON. Sizes and rates count 16-bit values: a size of 4 MB means that 4 MB of bf16 values
are encoded or decoded, or are the mean. Kernel and memcpy take turns in every round, so that other load on the machine slows both. With one
thread, times are those of the processor. Rates, shares and times are medians over rounds.
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
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import report
from megatron_zpp.ops import extension, gaussian, gaussian_reference, payload, quantization, reference

SLICES = 4
MOST_MEMBERS = 4
SAMPLE_SECONDS = 0.01  # a sample repeats the call for about this time
VALUE_BYTES = 2
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One op on some codes, with calls that run it on the kernel and on the reference, for the same tensors."""

    name: str
    codes: str
    kernel: Call
    reference: Call


@dataclass(frozen=True)
class Result:
    megabytes: int
    codes: str
    op: str
    nanoseconds_per_value: float
    gigabytes_per_second: float
    memcpy_gigabytes_per_second: float
    share_of_memcpy: float
    factor_over_reference: float


@dataclass(frozen=True)
class Clock:
    """Times calls. read: seconds since some moment."""

    read: Callable[[], float]

    def repeats(self, call: Call) -> int:
        """How often `call` runs in about SAMPLE_SECONDS."""
        call()
        return max(1, round(SAMPLE_SECONDS / max(self.seconds_per_call(call), 1e-7)))

    def seconds_per_call(self, call: Call, repeats: int = 1) -> float:
        start = self.read()
        for _ in range(repeats):
            call()
        return (self.read() - start) / repeats


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    if not extension.load():
        print(f"error: {extension.report()}", file=sys.stderr)
        return 1
    results = [result for megabytes in options.megabytes for result in _measure_size(megabytes, options)]
    setting = {"threads": options.threads}
    report("quantization", arguments, setting, table(results), {"results": [asdict(result) for result in results]}, options.output)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the quantization ops beside memcpy and beside the plain-torch reference.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="of bf16 values (default: %(default)s)")
    parser.add_argument("--block-numel", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--reference-rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--gaussian", action="store_true", help="time Gaussian codes of 1 to 4 bits instead of integers")
    parser.add_argument("--options", action="store_true", help="also time rotated values and stochastic rounding, of bf16 and fp32")
    return parser.parse_args(arguments)


def _measure_size(megabytes: int, options: argparse.Namespace) -> Iterator[Result]:
    clock = Clock(time.thread_time if options.threads == 1 else time.perf_counter)
    row_numel = megabytes * 2**20 // VALUE_BYTES // SLICES // options.block_numel * options.block_numel
    value_bytes = SLICES * row_numel * VALUE_BYTES
    values = torch.randn(SLICES, row_numel, generator=torch.Generator().manual_seed(1)).bfloat16()
    memcpy = _memcpy(values, torch.empty_like(values))
    for case in _gaussian_cases(values) if options.gaussian else _all_cases(values, options):
        kernel_seconds, memcpy_seconds, share = _side_by_side(case.kernel, memcpy, options.rounds, clock)
        reference_seconds = statistics.median(clock.seconds_per_call(case.reference) for _ in range(options.reference_rounds))
        gigabytes = value_bytes / 1e9
        yield Result(
            megabytes,
            case.codes,
            case.name,
            kernel_seconds * 1e9 / values.numel(),
            gigabytes / kernel_seconds,
            gigabytes / memcpy_seconds,
            share,
            reference_seconds / kernel_seconds,
        )


def _all_cases(values: Tensor, options: argparse.Namespace) -> Iterator[Case]:
    for bits in payload.BITS[::-1]:
        yield from _cases(values, bits, options.block_numel, options.options)


def _gaussian_cases(values: Tensor) -> Iterator[Case]:
    slices, row_numel = values.shape
    for bits, rounds in product(payload.GAUSSIAN_BITS, payload.GAUSSIAN_ROUNDS):
        form = {"bits": bits, "rounds": rounds}
        payloads = torch.zeros(2, slices, payload.gaussian_bytes(row_numel, bits), dtype=torch.uint8)
        for key, member in enumerate(payloads):
            gaussian.encode_gaussian(values, member, key=key, **form)
        encoded, mean = torch.zeros_like(payloads[0]), torch.zeros(values.shape)
        decoded, name = torch.empty_like(values), f"{rounds} round{'s' if rounds > 1 else ''}"
        calls: list[tuple[str, str, tuple[Tensor, ...], dict[str, object]]] = [
            ("encode", "encode_gaussian", (values, encoded), {"key": 0}),
            ("decode to bf16", "decode_gaussian", (payloads[0], decoded), {"keys": [0] * slices, "accumulate": False}),
            ("decode, add mean of 2", "decode_mean_gaussian", (payloads, mean), {"keys": [0, 1], "accumulate": True}),
        ]
        for what, op, tensors, arguments in calls:
            kernel, plain = (partial(getattr(room, op), *tensors, **arguments, **form) for room in (gaussian, gaussian_reference))
            yield Case(f"{what}, {name}", f"Gaussian {bits}", kernel, plain)


def _cases(values: Tensor, bits: int, block_numel: int, has_options: bool) -> Iterator[Case]:
    slices, row_numel = values.shape
    form: dict[str, Any] = {"bits": bits, "block_numel": block_numel}
    payloads = torch.zeros(MOST_MEMBERS, slices, payload.coded_bytes(row_numel, **form), dtype=torch.uint8)
    for member in payloads:
        quantization.encode_blocks(values, member, **form)
    encoded, decoded, mean = torch.zeros_like(payloads[0]), torch.empty_like(values), torch.zeros(values.shape)

    def case(name: str, op: str, *tensors: Tensor, **arguments: object) -> Case:
        kernel, plain = (partial(getattr(room, op), *tensors, **arguments) for room in (quantization, reference))
        return Case(name, f"INT{bits}", kernel, plain)

    yield case("encode", "encode_blocks", values, encoded, **form)
    yield case("decode to bf16", "decode_blocks", payloads[0], decoded, **form)
    for members in (2, MOST_MEMBERS):
        received = payloads[:members]
        yield case(f"decode, add mean of {members}", "decode_mean_blocks", received, mean, **form, accumulate=True)
        yield case(
            f"decode, mean of {members}, encode", "recode_mean_blocks", received, encoded, row_numel=row_numel, next_bits=bits, **form
        )
    if not has_options:
        return
    wide, received = values.float(), payloads[:2]
    for name, source in (("", values), (" fp32", wide)):
        yield case(f"rotate{name}, encode", "encode_blocks", source, encoded, **form, rotated=True)
        yield case(f"encode{name} stochastically", "encode_blocks", source, encoded, **form, noise_key=1)
        yield case(f"rotate{name}, encode stochastically", "encode_blocks", source, encoded, **form, rotated=True, noise_key=1)
    yield case("encode fp32", "encode_blocks", wide, encoded, **form)
    yield case("decode, add rotated mean of 2", "decode_mean_blocks", received, mean, **form, accumulate=True, rotated=True)
    stochastic = {"row_numel": row_numel, "next_bits": bits, "noise_key": 1}
    yield case("decode, mean of 2, encode stochastically", "recode_mean_blocks", received, encoded, **form, **stochastic)


def _memcpy(source: Tensor, target: Tensor) -> Call:
    def copy() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    return copy


def _side_by_side(kernel: Call, memcpy: Call, rounds: int, clock: Clock) -> tuple[float, float, float]:
    """Medians over rounds: seconds of the kernel, seconds of the memcpy, and the kernel's speed divided by that of the memcpy."""
    kernel_repeats, memcpy_repeats = clock.repeats(kernel), clock.repeats(memcpy)
    samples = [(clock.seconds_per_call(kernel, kernel_repeats), clock.seconds_per_call(memcpy, memcpy_repeats)) for _ in range(rounds)]
    share = statistics.median(memcpy_seconds / kernel_seconds for kernel_seconds, memcpy_seconds in samples)
    kernel_seconds, memcpy_seconds = (statistics.median(column) for column in zip(*samples, strict=True))
    return kernel_seconds, memcpy_seconds, share


def table(results: list[Result]) -> str:
    lines = [
        "| MB of bf16 | codes | op | ns per value | GB/s | memcpy GB/s | share of memcpy | x reference |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    cells = [
        str(result.megabytes),
        result.codes,
        result.op,
        f"{result.nanoseconds_per_value:.2f}",
        f"{result.gigabytes_per_second:.1f}",
        f"{result.memcpy_gigabytes_per_second:.1f}",
        f"{result.share_of_memcpy:.0%}",
        f"{result.factor_over_reference:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
