"""Times every kernel beside a plain device copy that moves the same bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.device_errors import in_words, is_fatal
from benchmarks.gpu.outcome import NotDone, Outcome
from benchmarks.gpu.place import Place, require_gpu, require_kernels
from testbed.kernels import timed_ops
from testbed.kernels.timed_ops import Call

MEGABYTES = (64, 256, 16, 1024, 4, 2048, 1)  # of bf16 values; the most important first
SLICES = 4
BLOCK_NUMEL = 256
CACHE_BYTES = 256 * 2**20  # more than any GPU's cache; smaller cases use several sets of tensors in turn
MOST_SETS = 64
ROUNDS = 7
ROUND_SECONDS = 0.005
SIZE_SECONDS, OP_SECONDS = 5.0, 1.5  # below which no further size and no further op is begun
AIM = 0.9
AIM_FROM_MEGABYTES = 64


@dataclass(frozen=True)
class Result:
    """One measurement. codes: of the payload. moved_bytes: bytes that the kernel reads and writes; the copy moves as many."""

    megabytes: int
    codes: str
    op: str
    moved_bytes: int
    microseconds: float
    terabytes_per_second: float
    share_of_copy: float
    why_no_graph: str = ""


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    require_gpu(place)
    require_kernels(place)
    results: list[Result] = []
    for megabytes in MEGABYTES:
        try:
            for result in _measure_size(megabytes, time, outcome):
                results.append(result)
                outcome.measure(kernels=[asdict(one) for one in results])
        except torch.OutOfMemoryError:
            outcome.omit(f"{megabytes} MB: not enough GPU memory is free")
        if not time.has(SIZE_SECONDS):
            outcome.ran_late(f"sizes after {megabytes} MB, of {', '.join(map(str, MEGABYTES))} MB")
            break
    outcome.say(*_aims(results), *_without_graph(results), *_table(results))


def _measure_size(megabytes: int, time: Deadline, outcome: Outcome) -> Iterator[Result]:
    """The results of one size. An error of one op is a failure, and the other ops are still timed. Out of memory ends the size."""
    row_numel = megabytes * 2**20 // 2 // SLICES // BLOCK_NUMEL * BLOCK_NUMEL
    for codes, op, make in timed_ops.timed_ops(SLICES, row_numel, BLOCK_NUMEL):
        if not time.has(OP_SECONDS):
            return
        try:
            yield _measure(megabytes, codes, op, make)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            outcome.check(f"{codes}, {op} at {megabytes} MB runs, and does not end with {in_words(error)}", holds=False)
            if is_fatal(error):
                raise
        torch.cuda.empty_cache()


def _measure(megabytes: int, codes: str, op: str, make: timed_ops.Make) -> Result:
    first, moved_bytes = make()
    sets = max(1, min(MOST_SETS, CACHE_BYTES // moved_bytes))
    kernels = [first, *(make()[0] for _ in range(sets - 1))]
    copies = [_copy(moved_bytes) for _ in range(sets)]
    (kernel, why_no_graph), (copy, _) = _replayed(kernels), _replayed(copies)
    rounds = [(_seconds(kernel) / sets, _seconds(copy) / sets) for _ in range(ROUNDS)]
    seconds = statistics.median(kernel_seconds for kernel_seconds, _ in rounds)
    share = statistics.median(copy_seconds / kernel_seconds for kernel_seconds, copy_seconds in rounds)
    return Result(megabytes, codes, op, moved_bytes, seconds * 1e6, moved_bytes / seconds / 1e12, share, why_no_graph)


def _copy(moved_bytes: int) -> Call:
    source = timed_ops.normal(moved_bytes // 8, device="cuda").view(torch.uint8)
    return partial(torch.empty_like(source).copy_, source)


def _replayed(calls: list[Call]) -> tuple[Call, str]:
    """All calls as one CUDA graph, so that the time of launching from Python does not count, and an empty text.

    If they cannot be captured: the calls one by one, and why.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # A capture that fails leaves its own stream as the current one.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            for call in calls:
                call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return lambda: [call() for call in calls], in_words(error)
    return graph.replay, ""


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
        raise NotDone("no kernel could be timed")
    rows = [
        f"| {result.megabytes} | {result.codes} | {result.op} | {result.microseconds:.1f} | "
        f"{result.terabytes_per_second:.2f} | {result.share_of_copy:.0%} |"
        for result in results
    ]
    return ["| MB of bf16 | codes | op | us | TB/s | share of copy |", "|---:|---|---|---:|---:|---:|", *rows]


def _without_graph(results: list[Result]) -> list[str]:
    plain = [result for result in results if result.why_no_graph]
    if not plain:
        return []
    why = plain[0].why_no_graph
    return [f"{len(plain)} of {len(results)} measurements count the host's launches, because no graph could be captured: {why}"]


def _aims(results: list[Result]) -> list[str]:
    aimed: list[Any] = [
        result
        for result in results
        if result.megabytes >= AIM_FROM_MEGABYTES and (result.codes, result.op) in timed_ops.BOUND_BY_MEMORY and result.share_of_copy < AIM
    ]
    if not aimed:
        return [f"aim met: all that memory bounds runs at {AIM:.0%} of copy bandwidth or more from {AIM_FROM_MEGABYTES} MB up"]
    return [f"aim missed: {result.codes} {result.op} at {result.megabytes} MB: {result.share_of_copy:.0%} of copy" for result in aimed]
