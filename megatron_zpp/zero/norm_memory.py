"""The memory that the gradient norm needs while it is computed (pure arithmetic, no torch)."""

from __future__ import annotations

from megatron_zpp.comm.code import Runs

CHUNK_NUMEL = 1 << 22  # on a CPU, elements are converted to fp64 one chunk at a time: 32 MiB
_FP64_BYTES = 8


def norm_bytes(runs: Runs) -> int:
    """Bytes of the fp64 copy of the largest chunk of one slice. A GPU needs less: one fp64 number for many elements."""
    return _FP64_BYTES * min(CHUNK_NUMEL, max(runs.blocks, runs.exact))
