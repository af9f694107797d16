from __future__ import annotations

import pytest

from megatron_zpp.training.hardware import CPU_CODEC, GPU_CODEC, HOST, SOCKET, peak_teraflops, planned_machine
from megatron_zpp.training.plan.machine import Overlap, SocketSpeed


@pytest.mark.parametrize(
    ("device_name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_of_no_other_whose_name_begins_alike(device_name: str, peak: float | None) -> None:
    assert peak_teraflops(device_name) == peak


def test_ranks_on_gpus_have_streams_and_a_host_and_ranks_on_cpus_a_thread_and_sockets() -> None:
    on_gpu, on_cpu = (planned_machine(100, 50, 1e12, is_on_gpu=is_on_gpu, inter_milliseconds=2) for is_on_gpu in (True, False))
    assert (on_gpu.overlap, on_gpu.codec, on_gpu.host, on_gpu.socket) == (Overlap.STREAMS, GPU_CODEC, HOST, SocketSpeed())
    assert (on_cpu.overlap, on_cpu.codec, on_cpu.host, on_cpu.socket) == (Overlap.THREAD, CPU_CODEC, None, SOCKET)
    for machine in (on_gpu, on_cpu):
        assert (machine.inter.bytes_per_second, machine.intra.bytes_per_second, machine.inter.latency_seconds) == (12.5e9, 50e9, 1e-3)
