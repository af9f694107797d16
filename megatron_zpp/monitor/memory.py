"""Reads the memory that this process uses."""

from __future__ import annotations

import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

PROCESS_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryReading:
    """On CUDA, the memory that torch has allocated and reserved on the device, and the peaks since the start; else the resident set.

    reserved_bytes, max_reserved_bytes and allocated_count (a number of allocations) are None without CUDA.
    """

    allocated_bytes: int
    max_allocated_bytes: int
    reserved_bytes: int | None = None
    max_reserved_bytes: int | None = None
    allocated_count: int | None = None


def read_memory(device: torch.device) -> MemoryReading:
    """The reading of this process now."""
    if device.type != "cuda":
        return MemoryReading(resident_bytes(PROCESS_STATUS), max_resident_bytes(PROCESS_STATUS))
    statistics = torch.cuda.memory_stats(device)  # empty before the first allocation
    kinds = (
        "allocated_bytes.all.current",
        "allocated_bytes.all.peak",
        "reserved_bytes.all.current",
        "reserved_bytes.all.peak",
        "allocation.all.current",
    )
    return MemoryReading(*(statistics.get(kind, 0) for kind in kinds))


def memory_line(rank: int, iteration: int, reading: MemoryReading) -> str:
    """Megatron's memory line, in MiB; with the `reserved` fields only on CUDA."""
    fields = {
        "allocated": reading.allocated_bytes,
        "max allocated": reading.max_allocated_bytes,
        "reserved": reading.reserved_bytes,
        "max reserved": reading.max_reserved_bytes,
    }
    words = [f"{name}: {nbytes / 2**20:.2f}" for name, nbytes in fields.items() if nbytes is not None]
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {' | '.join(words)}"


def resident_bytes(status_file: Path) -> int:
    """VmRSS of a Linux process status file. Without such a file the maximum, because getrusage reports nothing else."""
    return _bytes_in(status_file, "VmRSS") or _max_resident_by_getrusage()


def max_resident_bytes(status_file: Path) -> int:
    """VmHWM of a Linux process status file. Without such a file, the maximum resident set that getrusage reports for this process."""
    return _bytes_in(status_file, "VmHWM") or _max_resident_by_getrusage()


def _bytes_in(status_file: Path, name: str) -> int | None:
    """The number of bytes in the line `name: 12 kB`; None if there is no such line."""
    if not status_file.exists():
        return None
    found = re.search(rf"^{name}:\s*(\d+) kB$", status_file.read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _max_resident_by_getrusage() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2) counts kilobytes on Linux, bytes on macOS
