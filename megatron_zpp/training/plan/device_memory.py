"""Estimates the memory of a GPU that a rank takes beside its tensors: libraries, and the buffers of NCCL."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.parallel.communicators import MEBIBYTE, communicators
from megatron_zpp.parallel.grid import Grid

# The context of CUDA with the kernels that are loaded into it, of torch, cuBLAS, cuDNN, NCCL and this repository: 0.3 to 0.8 GiB are
# commonly reported for torch with lazy loading. One rank on an H100 had 0.82 GiB beside torch's allocator.
CONTEXT_BYTES = 1024 * MEBIBYTE
# torch gives cuBLAS a workspace for each handle and stream (ATen/cuda/CublasHandlePool.cpp): 32 MiB on Hopper and Blackwell, and for
# CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic mode sets; 8 MiB on others. A handle belongs to a thread: one runs forward, the other
# is autograd's. Both compute in one stream.
WORKSPACE_BYTES = 32 * MEBIBYTE
MATRIX_THREADS = 2


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU beside tensors. context: of CUDA. workspaces: of cuBLAS. communicators: buffers of NCCL."""

    context: int = 0
    workspaces: int = 0
    communicators: int = 0

    @property
    def total(self) -> int:
        return self.context + self.workspaces + self.communicators

    def beside(self, taken: DeviceMemory) -> DeviceMemory:
        """What is left if a run has started with `taken`: context and buffers exist before its first tensor, workspaces do not."""
        return DeviceMemory(max(0, self.context - taken.context), self.workspaces, max(0, self.communicators - taken.communicators))


NO_DEVICE = DeviceMemory()


def device_memory(*grids: Grid) -> DeviceMemory:
    """The memory of a rank's GPU beside tensors. grids: those in which it has communicators, such as its island and its column."""
    buffers = sum(communicator.buffer_bytes() for grid in grids for communicator in communicators(grid))
    return DeviceMemory(CONTEXT_BYTES, MATRIX_THREADS * WORKSPACE_BYTES, buffers)
