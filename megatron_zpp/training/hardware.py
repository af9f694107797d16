"""Speeds that plans assume: the user gives the rates of links, constants here give the rest (no torch)."""

from __future__ import annotations

import re

from megatron_zpp.training.plan.machine import CodecSpeed, HostSpeed, LinkSpeed, Machine, Overlap

# One core of a server CPU, blocks of 256, 16 MB and more, medians from benchmarks/results/quantization_cpu.json: encode processes 17
# gigabytes of 16-bit values per second, decode 20. In a mean of 2 members a value of each takes 0.14 ns, of 4 members 0.11.
# Gaussian codes: the same for messages of 1 MB with AVX-512, from benchmarks/results/gaussian_cpu.json, means over 1 to 4 bits; a round of
# rotation is what a second one adds. Estimated: a difference, which reads 6 bytes per value and writes 4.
CPU_CODEC = CodecSpeed(
    encoded=0.12e-9,
    decoded=0.10e-9,
    summed=0.13e-9,
    gaussian_encoded=0.40e-9,
    gaussian_decoded=0.28e-9,
    rotated=0.17e-9,
    subtracted=0.5e-9,
)
# One H100, blocks of 256, 64 MB of bf16 values, from benchmarks/results/gpu_h100.json: means over 4 and 8 bits, and over 3 and 1 bit of
# Gaussian codes. A mean of 2 members is decoded and added to fp32. A round of rotation is what it adds to integer codes.
# Estimated: a difference moves 10 bytes per value at the rate of a copy.
GPU_CODEC = CodecSpeed(
    encoded=1.1e-12,
    decoded=1.1e-12,
    summed=2.1e-12,
    gaussian_encoded=1.9e-12,
    gaussian_decoded=1.4e-12,
    rotated=0.16e-12,
    subtracted=3.5e-12,
)
# Assumed: a GPU on 16 lanes of PCIe 4 copies 24 to 26 GB/s to and from pinned memory, as is commonly reported. Measured on PCIe 5: 55 GB/s.
# AdamW reads 16 and writes 12 bytes per value, so memory decides: a node of two sockets with 56 GB/s in use for it updates 2e9 values per
# second. That is assumed, too.
HOST = HostSpeed(bytes_per_second=25e9, values_per_second=2e9)
# Latency of small messages. Assumed, not measured: gloo over a bridge on one machine, and for NCCL what is commonly reported.
GLOO_COLLECTIVE_SECONDS = 0.7e-3
NCCL_INTER_COLLECTIVE_SECONDS = 30e-6
NCCL_INTRA_COLLECTIVE_SECONDS = 15e-6

# TFLOP/s of dense bf16 and fp16 matrix products, by torch's name of the device, from NVIDIA's data sheets. The first match counts.
PEAK_TERAFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H100": 989.4,
    "A100": 312.0,
    "A40": 149.7,
    "L40S": 362.05,
    "V100-PCIE": 112.0,
    "V100": 125.0,
}


def peak_teraflops(device_name: str) -> float | None:
    """Peak TFLOP/s of a device in 16-bit arithmetic, None if unknown."""
    return next((peak for name, peak in PEAK_TERAFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


GIGABYTE, GIGABIT, TERA = 1e9, 1e9 / 8, 1e12


def planned_machine(
    inter_gigabits: float,
    intra_gigabytes: float,
    flops_per_second: float,
    *,
    is_on_gpu: bool,
    inter_milliseconds: float = 0.0,
    overlap: Overlap | None = None,
) -> Machine:
    """Machine with these rates of links, in Gbit/s into a node and GB/s into a rank, and the latencies and codec speeds of this file.

    flops_per_second: of one rank, in model FLOPs (docs/logs.md) and those that are computed again.
    inter_milliseconds: round trip between nodes; a message takes half of it, beside the latency of this file.
    overlap: means of running hops beside computation; by default streams on GPUs, otherwise a thread.
    """
    inter_latency = NCCL_INTER_COLLECTIVE_SECONDS if is_on_gpu else GLOO_COLLECTIVE_SECONDS
    intra_latency = NCCL_INTRA_COLLECTIVE_SECONDS if is_on_gpu else GLOO_COLLECTIVE_SECONDS
    return Machine(
        LinkSpeed(inter_gigabits * GIGABIT, inter_latency, inter_milliseconds / 2000),
        LinkSpeed(intra_gigabytes * GIGABYTE, intra_latency),
        GPU_CODEC if is_on_gpu else CPU_CODEC,
        overlap or (Overlap.STREAMS if is_on_gpu else Overlap.THREAD),
        flops_per_second,
        host=HOST if is_on_gpu else None,
    )
