"""Inputs of recomputed chunks on the host of the GPU: rates of their copies, copies beside computation, and what they save of the peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu import differences
from benchmarks.gpu.beside import report_overlap, seconds_of
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place
from megatron_zpp.comm.kept_places import HostPlaces, Kept
from megatron_zpp.comm.streams import CudaStreams

GPU_SHAPE = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 8 --vocab-size 50257"
CPU_SHAPE = "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --vocab-size 100"
FLAGS = "--zero-stage 3 --checkpoint-activations"
SWITCHES = ("--contiguous-checkpointing", "--checkpoint-in-cpu")
LEAST_SAVED = 0.8  # of what the plan says that the peak becomes smaller; the rest of a peak is not always at the same place
CHUNKS, CHUNK_NUMEL = 12, 1 << 25
LEAST_RATE = 5e9  # bytes per second; copies of memory that is not pinned reach less on most machines
ROUNDS = 5
PRODUCT_SIZE = 8192


@dataclass(frozen=True)
class Peak:
    """The peak of the device in a few steps, in bytes: measured and planned. losses: of these steps."""

    measured: int
    planned: int
    losses: list[float]


def check_peaks(outcome: Outcome, place: Place, peak_of: Callable[[str], Peak], largest_difference: float) -> None:
    """Compares runs with the switches to one without. peak_of: trains with these flags. largest_difference: of a loss."""
    shape = CPU_SHAPE if place.is_tiny else GPU_SHAPE
    plain = peak_of(f"{shape} {FLAGS}")
    for switch in SWITCHES:
        found = peak_of(f"{shape} {FLAGS} {switch}")
        outcome.measure(**{switch: {"plain": vars(plain), "kept": vars(found)}})
        largest = differences.largest_difference(found.losses, plain.losses)
        outcome.check(f"{switch}: losses differ by at most {largest:.1e} of themselves", holds=largest <= largest_difference)
        saved, planned = plain.measured - found.measured, plain.planned - found.planned
        if place.is_gpu and planned > 0:
            outcome.check(f"{switch}: the peak is {saved:,} bytes smaller, planned are {planned:,}", holds=saved >= LEAST_SAVED * planned)


def measure_copies(outcome: Outcome, place: Place) -> None:
    """Times the copies of a forward and of a backward, alone and beside matrix products, as chunks make them."""
    places = HostPlaces(CHUNKS, CHUNK_NUMEL, torch.bfloat16, place.device, CudaStreams(place.device))
    matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=place.device, dtype=torch.bfloat16)
    kept: list[Kept] = []

    def multiply() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def multiply_for_all() -> None:
        for _ in range(CHUNKS):
            multiply()

    def forward(compute: Callable[[], None]) -> None:
        kept.clear()
        for chunk in range(CHUNKS):
            kept.append(places.keep(chunk, torch.ones(CHUNK_NUMEL, device=place.device, dtype=torch.bfloat16)))
            compute()

    def backward(compute: Callable[[], None]) -> None:
        kept[-1].start()
        for chunk in reversed(range(CHUNKS)):
            if chunk:
                kept[chunk - 1].start()
            kept[chunk].values()
            compute()

    products = 1
    for way, copies in {"down": forward, "up": backward}.items():
        for _ in range(2):  # the first warms up
            copies(_nothing)
        copying = min(seconds_of(place, lambda copies=copies: copies(_nothing)) for _ in range(ROUNDS))  # type: ignore[misc]
        rate = CHUNKS * CHUNK_NUMEL * 2 / copying
        outcome.check(f"kept inputs are copied {way} at {rate / 1e9:.1f} GB/s", holds=rate >= LEAST_RATE)
        products = 1
        products = max(1, round(copying / CHUNKS / min(seconds_of(place, multiply) for _ in range(ROUNDS))))
        multiplying = min(seconds_of(place, multiply_for_all) for _ in range(ROUNDS))
        together = min(seconds_of(place, lambda copies=copies: copies(multiply)) for _ in range(ROUNDS))  # type: ignore[misc]
        report_overlap(outcome, copying, multiplying, together, f"copies {way} of kept inputs")
        outcome.measure(**{f"kept inputs {way}": {"rate": rate, "copying": copying, "multiplying": multiplying, "together": together}})


def _nothing() -> None:
    """Computes nothing: only the copies are timed."""
