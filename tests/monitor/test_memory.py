"""Peaks of memory."""

import resource
import sys

import pytest
import torch

from megatron_zpp.monitor.memory import PROCESS_STATUS, max_memory_bytes, max_resident_bytes


def test_vmhwm_is_read_as_kibibytes(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t     123 kB\nVmRSS:\t  77 kB\n")
    assert max_resident_bytes(status) == 123 * 1024


@pytest.mark.skipif(sys.platform == "darwin", reason="getrusage counts bytes there")
def test_without_a_status_file_getrusage_answers(tmp_path):
    assert max_resident_bytes(tmp_path / "none") == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.skipif(not PROCESS_STATUS.exists(), reason="needs Linux's process status")
def test_peak_on_cpu_covers_memory_already_released():
    block_bytes = 1 << 28
    resident_bytes = int(PROCESS_STATUS.read_text().split("VmRSS:")[1].split()[0]) * 1024
    block = bytearray(b"x") * block_bytes
    del block
    assert max_memory_bytes(torch.device("cpu")) >= resident_bytes + block_bytes * 0.9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_on_cuda_covers_memory_already_released():
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    before = max_memory_bytes(device)
    block = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    del block
    assert max_memory_bytes(device) == before + (1 << 26)
