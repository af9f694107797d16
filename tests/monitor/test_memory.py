"""Peaks of memory."""

import resource
import sys

import pytest
import torch

from megatron_zpp.monitor.memory import (
    PROCESS_STATUS,
    MemoryReading,
    max_resident_bytes,
    memory_line,
    read_memory,
    resident_bytes,
)


def test_vmhwm_is_read_as_kibibytes(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t     123 kB\nVmRSS:\t  77 kB\n")
    assert max_resident_bytes(status) == 123 * 1024 and resident_bytes(status) == 77 * 1024


@pytest.mark.skipif(sys.platform == "darwin", reason="getrusage counts bytes there")
def test_without_a_status_file_getrusage_answers(tmp_path):
    assert max_resident_bytes(tmp_path / "none") == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.skipif(not PROCESS_STATUS.exists(), reason="needs Linux's process status")
def test_peak_on_cpu_covers_memory_already_released():
    block_bytes = 1 << 28
    resident_bytes = int(PROCESS_STATUS.read_text().split("VmRSS:")[1].split()[0]) * 1024
    block = bytearray(b"x") * block_bytes
    del block
    assert read_memory(torch.device("cpu")).max_allocated_bytes >= resident_bytes + block_bytes * 0.9


@pytest.mark.skipif(not PROCESS_STATUS.exists(), reason="needs Linux's process status")
def test_on_cpu_the_resident_set_stands_for_what_is_allocated_and_nothing_is_reserved():
    reading = read_memory(torch.device("cpu"))
    assert 0 < reading.allocated_bytes <= reading.max_allocated_bytes
    assert (reading.reserved_bytes, reading.max_reserved_bytes, reading.allocated_count) == (None, None, None)


def test_the_line_is_megatrons():
    mib = 2**20
    assert memory_line(0, 20, MemoryReading(4459 * mib + mib // 2, 10258 * mib, 20538 * mib, 20540 * mib, 7)) == (
        "[Rank 0] (after 20 iterations) memory (MB) | allocated: 4459.50 | max allocated: 10258.00 | "
        "reserved: 20538.00 | max reserved: 20540.00"
    )
    assert memory_line(0, 1, MemoryReading(mib, 2 * mib)).endswith("memory (MB) | allocated: 1.00 | max allocated: 2.00")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_on_cuda_covers_memory_already_released():
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    before = read_memory(device).max_allocated_bytes
    block = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    del block
    assert read_memory(device).max_allocated_bytes == before + (1 << 26)
