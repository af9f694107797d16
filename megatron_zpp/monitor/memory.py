"""The most memory this process has held."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch

PROCESS_STATUS = Path("/proc/self/status")


def max_memory_bytes(device: torch.device) -> int:
    """On cuda: the peak of what torch allocated on the device since the start or the last reset of its statistics.

    On any other device: the peak of the process's resident set since its start, libraries and file pages included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max_resident_bytes(PROCESS_STATUS)


def max_resident_bytes(status_file: Path) -> int:
    """VmHWM of a Linux process status file; where there is none, the maximum resident set that getrusage reports for this process."""
    if status_file.exists():
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status_file.read_text(), re.MULTILINE)
        if found:
            return int(found.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2) counts kilobytes on Linux, bytes on macOS
