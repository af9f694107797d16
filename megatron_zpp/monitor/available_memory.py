"""Finds how much memory a rank may use."""

from __future__ import annotations

import re
from pathlib import Path

import torch

HOST_MEMORY = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


def bytes_for_rank(device: torch.device, ranks_on_host: int) -> int | None:
    """This rank's share of the free memory of its GPU, or of the host memory that is available; None if that is not known.

    What all ranks have taken already is not free, such as the context of CUDA; none of them may take more while another asks.
    ranks_on_host: ranks that run on this machine; they share its memory, and its GPUs if there are fewer GPUs than ranks.
    """
    if device.type == "cuda":
        ranks_on_device = -(-ranks_on_host // torch.cuda.device_count())
        return int(torch.cuda.mem_get_info(device)[0]) // ranks_on_device
    available = available_host_bytes(HOST_MEMORY, CONTROL_GROUP)
    return None if available is None else available // ranks_on_host


def available_host_bytes(host_memory: Path, control_group: Path) -> int | None:
    """MemAvailable of Linux's /proc/meminfo, or what a container's control group (version 2) leaves if that is less; else None."""
    available = _numbers_in(host_memory).get("MemAvailable")
    if available is None:
        return None
    limit = _text_of(control_group / "memory.max").strip()
    if not limit.isdigit():  # "max" means no limit
        return available * 1024
    used = int(_text_of(control_group / "memory.current").strip() or 0)
    cached = _numbers_in(control_group / "memory.stat")  # page cache counts as used, but is freed on demand
    held = used - cached.get("active_file", 0) - cached.get("inactive_file", 0)
    return min(available * 1024, max(0, int(limit) - held))


def _numbers_in(file: Path) -> dict[str, int]:
    """`name: 12 kB` or `name 12` on each line."""
    return {name: int(number) for name, number in re.findall(r"^(\w+):? +(\d+)(?: kB)?$", _text_of(file), re.MULTILINE)}


def _text_of(file: Path) -> str:
    return file.read_text() if file.is_file() else ""
