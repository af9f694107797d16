"""Speeds that plans assume: the user gives the rates of links, constants here give the rest (no torch)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from megatron_zpp.training.plan.machine import CodecSpeed, HostSpeed, LinkSpeed, Machine, Overlap, SocketSpeed


@dataclass(frozen=True)
class Constant:
    """A speed that plans assume. seconds: for one of what `of` names. device: cpu, where ranks compute on cores and use gloo, or gpu.

    source: the file of benchmarks/results from which it comes; or "assumed", if nobody has measured it, and why this value.
    """

    device: str
    name: str
    seconds: float
    of: str
    source: str


_CPU_CODES = "quantization_cpu.json: one core, blocks of 256, median from 16 MB on"
_CPU_GAUSSIAN = "gaussian_cpu.json: one core with AVX-512, messages of 1 MB, mean over 1 to 4 bits"
_GPU_CODES = "gpu_h100.json: 64 MB of bf16, mean over 4 and 8 bits"
_GPU_GAUSSIAN = "gpu_h100.json: 64 MB of bf16, mean over 3 and 1 bit"
_SOCKETS = "sockets_cpu.json: processor time of each of 2 ranks over loopback, mean over payloads of 1 and 4 MB"
# Names of work of codecs are those of ops/planned.py:CodecWork. `benchmarks/constants.py` measures what it can on a machine.
CONSTANTS = (
    Constant("cpu", "encoded", 0.12e-9, "value", _CPU_CODES),
    Constant("cpu", "decoded", 0.10e-9, "value", _CPU_CODES),
    Constant("cpu", "summed", 0.13e-9, "value of each member", f"{_CPU_CODES}; mean over 2 and 4 members"),
    Constant("cpu", "gaussian_encoded", 0.40e-9, "value", _CPU_GAUSSIAN),
    Constant("cpu", "gaussian_decoded", 0.28e-9, "value", _CPU_GAUSSIAN),
    Constant("cpu", "rotated", 0.17e-9, "value and round", f"{_CPU_GAUSSIAN}; what a second round adds"),
    Constant("cpu", "subtracted", 0.5e-9, "value", "assumed: reads 6 bytes and writes 4"),
    Constant("cpu", "gathered", 1.7e-9, "byte received", _SOCKETS),
    Constant("cpu", "exchanged", 0.9e-9, "byte received", _SOCKETS),
    Constant("cpu", "collective", 0.7e-3, "collective", "assumed: gloo over a bridge on one machine"),
    Constant("gpu", "encoded", 1.1e-12, "value", _GPU_CODES),
    Constant("gpu", "decoded", 1.1e-12, "value", _GPU_CODES),
    Constant("gpu", "summed", 2.1e-12, "value of each member", f"{_GPU_CODES}; a mean of 2 is added to fp32"),
    Constant("gpu", "gaussian_encoded", 1.9e-12, "value", _GPU_GAUSSIAN),
    Constant("gpu", "gaussian_decoded", 1.4e-12, "value", _GPU_GAUSSIAN),
    Constant("gpu", "rotated", 0.16e-12, "value and round", "gpu_h100.json: what rotation adds to integer codes"),
    Constant("gpu", "subtracted", 3.5e-12, "value", "assumed: moves 10 bytes at the rate of a copy"),
    Constant("gpu", "inter collective", 30e-6, "collective", "assumed: what is commonly reported of NCCL"),
    Constant("gpu", "intra collective", 15e-6, "collective", "assumed: what is commonly reported of NCCL"),
    Constant("gpu", "host link", 1 / 25e9, "byte", "assumed: 16 lanes of PCIe 4, as commonly reported; an H100 on PCIe 5 copied 55 GB/s"),
    Constant("gpu", "AdamW on the host", 1 / 2e9, "value", "assumed: moves 28 bytes; all cores of a node with 56 GB/s in use for it"),
)


def _seconds(device: str, name: str) -> float:
    return next(constant.seconds for constant in CONSTANTS if (constant.device, constant.name) == (device, name))


def _codec(device: str) -> CodecSpeed:
    return CodecSpeed(**{field.name: _seconds(device, field.name) for field in fields(CodecSpeed)})


CPU_CODEC, GPU_CODEC = _codec("cpu"), _codec("gpu")
SOCKET = SocketSpeed(_seconds("cpu", "gathered"), _seconds("cpu", "exchanged"))
HOST = HostSpeed(bytes_per_second=1 / _seconds("gpu", "host link"), values_per_second=1 / _seconds("gpu", "AdamW on the host"))
GLOO_COLLECTIVE_SECONDS = _seconds("cpu", "collective")
NCCL_INTER_COLLECTIVE_SECONDS, NCCL_INTRA_COLLECTIVE_SECONDS = _seconds("gpu", "inter collective"), _seconds("gpu", "intra collective")

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
    """Machine with these rates of links, in Gbit/s into a node and GB/s into a rank, and the other speeds of this file.

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
        socket=SocketSpeed() if is_on_gpu else SOCKET,
    )
