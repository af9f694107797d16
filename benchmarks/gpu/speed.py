"""Times every kernel beside a plain device copy that moves the same bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.deadline import Deadline
from gpu.outcome import NotDone, Outcome
from gpu.place import Place, require_gpu, require_kernels

MEGABYTES = (64, 256, 16, 1024, 4, 2048, 1)  # of bf16 values; the most important first
SLICES = 4
BLOCK_NUMEL = 256
CACHE_BYTES = 256 * 2**20  # more than any GPU's cache; smaller cases use several sets of tensors in turn
MOST_SETS = 64
ROUNDS = 7
ROUND_SECONDS = 0.01
SIZE_SECONDS, OP_SECONDS = 5.0, 1.5  # below which no further size and no further op is begun
AIM = 0.9
AIM_FROM_MEGABYTES = 64
Call = Callable[[], object]


@dataclass(frozen=True)
class Result:
    """One measurement. moved_bytes: bytes that the kernel reads and writes; the copy moves as many."""

    megabytes: int
    bits: int
    op: str
    moved_bytes: int
    microseconds: float
    terabytes_per_second: float
    share_of_copy: float


# By kernel of the registry, the ops of `_ops` that call it; another kernel is not timed yet.
TIMED = {
    "encode_blocks": "encode",
    "decode_blocks": "decode to",
    "decode_mean_blocks": "decode, add",
    "recode_mean_blocks": "decode, mean",
    "drop_values": "dropout",
}


def run(time: Deadline, outcome: Outcome) -> None:
    from megatron_zpp.ops import extension

    place = Place.here()
    require_gpu(place)
    require_kernels(place)
    for op in extension.OPS:
        if op not in TIMED:
            outcome.omit(f"the kernel {op}: its time is not taken here")
    results: list[Result] = []
    for megabytes in MEGABYTES:
        try:
            for result in _measure_size(megabytes, time):
                results.append(result)
                outcome.measure(kernels=[asdict(one) for one in results])
        except torch.OutOfMemoryError:
            outcome.omit(f"{megabytes} MB: not enough GPU memory is free")
        if not time.has(SIZE_SECONDS):
            outcome.ran_late(f"sizes after {megabytes} MB, of {', '.join(map(str, MEGABYTES))} MB")
            break
    outcome.say(*_table(results), *_aims(results))


def _measure_size(megabytes: int, time: Deadline) -> Iterator[Result]:
    run_numel = megabytes * 2**20 // 2 // SLICES // BLOCK_NUMEL * BLOCK_NUMEL
    yield _measure(megabytes, 16, "dropout of bf16", partial(_drop, SLICES * run_numel))
    for bits in (8, 4):
        for op, make in _ops(run_numel, bits).items():
            if not time.has(OP_SECONDS):
                return
            yield _measure(megabytes, bits, op, make)
            torch.cuda.empty_cache()


def _drop(numel: int) -> tuple[Call, int]:
    values = torch.randn(numel, device="cuda", dtype=torch.bfloat16)
    dropped = torch.empty_like(values)
    return partial(torch.ops.megatron_zpp.drop_values, values, dropped, 2**62, 3, 429496730, 1 / 0.9), 2 * values.nbytes


def _ops(run_numel: int, bits: int, device: str = "cuda") -> dict[str, Callable[[], tuple[Call, int]]]:
    """By name, a function that makes a call with new tensors and returns it with the bytes that the call moves."""
    from megatron_zpp.ops import payload, quantization

    form: dict[str, Any] = {"bits": bits, "block_numel": BLOCK_NUMEL}
    row_bytes = payload.coded_bytes(run_numel, **form)

    def payloads(*shape: int) -> Tensor:
        made = torch.empty(*shape, row_bytes, dtype=torch.uint8, device=device)
        values = torch.randn(SLICES, run_numel, device=device, dtype=torch.bfloat16)
        for member in made.view(-1, SLICES, row_bytes):
            quantization.encode_blocks(values, member, **form)
        return made

    def encode(dtype: torch.dtype, **options: Any) -> tuple[Call, int]:
        values = torch.randn(SLICES, run_numel, device=device).to(dtype)
        target = torch.empty(SLICES, row_bytes, dtype=torch.uint8, device=device)
        return partial(quantization.encode_blocks, values, target, **form, **options), values.nbytes + target.nbytes

    def decode(dtype: torch.dtype) -> tuple[Call, int]:
        source, values = payloads(SLICES), torch.empty(SLICES, run_numel, dtype=dtype, device=device)
        return partial(quantization.decode_blocks, source, values, **form), values.nbytes + source.nbytes

    def add_mean(members: int, **options: Any) -> tuple[Call, int]:
        source, mean = payloads(members, SLICES), torch.zeros(SLICES, run_numel, device=device)
        call = partial(quantization.decode_mean_blocks, source, mean, **form, accumulate=True, **options)
        return call, 2 * mean.nbytes + source.nbytes

    def recode(members: int, **options: Any) -> tuple[Call, int]:
        source, target = payloads(members, SLICES), torch.empty(SLICES, row_bytes, dtype=torch.uint8, device=device)
        call = partial(quantization.recode_mean_blocks, source, target, run_numel=run_numel, next_bits=bits, **form, **options)
        return call, source.nbytes + target.nbytes

    return {
        "encode bf16": partial(encode, torch.bfloat16),
        "encode fp32": partial(encode, torch.float32),
        "decode to bf16": partial(decode, torch.bfloat16),
        "decode to fp32": partial(decode, torch.float32),
        "decode, add mean of 2": partial(add_mean, 2),
        "decode, mean of 2, encode": partial(recode, 2),
        "decode, mean of 8, encode": partial(recode, 8),
        "rotate bf16, encode": partial(encode, torch.bfloat16, rotated=True),
        "encode bf16 stochastically": partial(encode, torch.bfloat16, noise_key=1),
        "rotate bf16, encode stochastically": partial(encode, torch.bfloat16, rotated=True, noise_key=1),
        "decode, add rotated mean of 2": partial(add_mean, 2, rotated=True),
        "decode, mean of 2, encode stochastically": partial(recode, 2, noise_key=1),
    }


def _measure(megabytes: int, bits: int, op: str, make: Callable[[], tuple[Call, int]]) -> Result:
    first, moved_bytes = make()
    sets = max(1, min(MOST_SETS, CACHE_BYTES // moved_bytes))
    kernels = [first, *(make()[0] for _ in range(sets - 1))]
    copies = [_copy(moved_bytes) for _ in range(sets)]
    kernel, copy = _replayed(kernels), _replayed(copies)
    rounds = [(_seconds(kernel) / sets, _seconds(copy) / sets) for _ in range(ROUNDS)]
    seconds = statistics.median(kernel_seconds for kernel_seconds, _ in rounds)
    share = statistics.median(copy_seconds / kernel_seconds for kernel_seconds, copy_seconds in rounds)
    return Result(megabytes, bits, op, moved_bytes, seconds * 1e6, moved_bytes / seconds / 1e12, share)


def _copy(moved_bytes: int) -> Call:
    source = torch.randint(0, 256, (moved_bytes // 2,), dtype=torch.uint8, device="cuda")
    return partial(torch.empty_like(source).copy_, source)


def _replayed(calls: list[Call]) -> Call:
    """All calls as one CUDA graph, so that the time of launching from Python does not count."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _seconds(replay: Call) -> float:
    once = _timed(replay, 1)
    return _timed(replay, max(1, round(ROUND_SECONDS / max(once, 1e-6))))


def _timed(replay: Call, repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def _table(results: list[Result]) -> list[str]:
    if not results:
        raise NotDone("no size fits into the GPU's memory")
    rows = [
        f"| {result.megabytes} | INT{result.bits} | {result.op} | {result.microseconds:.1f} | "
        f"{result.terabytes_per_second:.2f} | {result.share_of_copy:.0%} |"
        for result in sorted(results, key=lambda result: (result.megabytes, -result.bits))
    ]
    return ["| MB of bf16 | codes | op | us | TB/s | share of copy |", "|---:|---|---|---:|---:|---:|", *rows]


def _aims(results: list[Result]) -> list[str]:
    aimed: list[Any] = [
        result
        for result in results
        if result.megabytes >= AIM_FROM_MEGABYTES
        and result.op.startswith(("encode", "decode to", "dropout"))
        and result.share_of_copy < AIM
    ]
    if not aimed:
        return [f"aim met: encode, decode and dropout run at {AIM:.0%} of copy bandwidth or more from {AIM_FROM_MEGABYTES} MB up"]
    return [f"aim missed: INT{result.bits} {result.op} at {result.megabytes} MB: {result.share_of_copy:.0%} of copy" for result in aimed]
