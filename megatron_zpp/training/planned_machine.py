"""Where a planned run computes: rates of links as the user says them, and constants for the rest (no torch)."""

from __future__ import annotations

from megatron_zpp.training.assumed_hardware import (
    CPU_CODEC,
    GLOO_COLLECTIVE_SECONDS,
    GPU_CODEC,
    NCCL_INTER_COLLECTIVE_SECONDS,
    NCCL_INTRA_COLLECTIVE_SECONDS,
)
from megatron_zpp.zero.time_model import LinkSpeed, Machine, Overlap

GIGABYTE, GIGABIT, TERA = 1e9, 1e9 / 8, 1e12


def planned_machine(inter_gigabits: float, intra_gigabytes: float, *, is_on_gpu: bool, overlap: Overlap | None = None) -> Machine:
    """A machine with these rates of links, in Gbit/s into a node and GB/s into a rank, and the constants of assumed_hardware.

    overlap: what runs beside computation; by default streams on GPUs, elsewhere a thread.
    """
    inter_latency = NCCL_INTER_COLLECTIVE_SECONDS if is_on_gpu else GLOO_COLLECTIVE_SECONDS
    intra_latency = NCCL_INTRA_COLLECTIVE_SECONDS if is_on_gpu else GLOO_COLLECTIVE_SECONDS
    return Machine(
        LinkSpeed(inter_gigabits * GIGABIT, inter_latency),
        LinkSpeed(intra_gigabytes * GIGABYTE, intra_latency),
        GPU_CODEC if is_on_gpu else CPU_CODEC,
        overlap or (Overlap.STREAMS if is_on_gpu else Overlap.THREAD),
    )
