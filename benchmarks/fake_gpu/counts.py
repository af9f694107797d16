"""What the host has asked of a fake GPU, in a process that has one."""

from __future__ import annotations

import ctypes

LAUNCH, PRODUCT = "launch", "product"
HOST_WAIT, STREAM_WAIT, EVENT = "wait of the host", "wait of a stream", "event"
COLLECTIVE, KERNEL = "collective ", "kernel "  # before the name of a function of NCCL, and of a kernel


def forget_counts() -> None:
    _library().fake_gpu_forget_counts()


def counts() -> dict[str, int]:
    """How often the host has called each kind of function since counts were forgotten; collectives and kernels also by name."""
    call = _library().fake_gpu_counts
    call.restype = ctypes.c_char_p
    rows = (line.split("\t") for line in call().decode().splitlines())
    return {name: int(number) for number, name in rows}


def _library() -> ctypes.CDLL:
    """All libraries of this process, with the one that was loaded before all others."""
    return ctypes.CDLL(None)
