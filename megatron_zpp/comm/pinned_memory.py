"""Memory of the host that a GPU copies to and from by itself."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

REGISTER_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable


def copied_to(device: torch.device, values: Tensor) -> Tensor:
    """`values` on `device`.

    A GPU copies values of the host in the order of its stream, from pinned memory, while the host goes on; torch keeps that memory until
    then.
    """
    if device.type == "cuda" and not values.is_cuda:
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def pinned_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] zeros that are pinned, in no more memory than they need.

    torch's own allocator of pinned memory rounds up to a power of two: 9 GiB would take 16. So CUDA pins memory of the ordinary
    allocator, as torch does for its checkpoints, and lets go of it before that memory is freed.
    Raises RuntimeError if the host has too little memory, or forbids to lock it.
    """
    values = torch.zeros(numel, dtype=dtype, device="cpu")
    if values.nbytes == 0:
        return values
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(values.data_ptr(), values.nbytes, REGISTER_FOR_ALL_CONTEXTS))
    if code != 0:
        raise RuntimeError(
            f"{values.nbytes} bytes of host memory could not be pinned (CUDA error {code}); free some, or raise the limit of locked memory "
            "(ulimit -l) where the ranks start"
        )
    weakref.finalize(values.untyped_storage(), runtime.cudaHostUnregister, values.data_ptr()).atexit = False
    return values
