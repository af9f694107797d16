"""A copy of this rank's state in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_zpp.zero.pieces import Piece


class HostSnapshot:
    """Host memory for the values of `pieces`, pinned where they are on a GPU; it is taken once and filled again for every checkpoint.

    The values must not change from `begin` until `copy`, which any thread may call, has returned.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        on_gpu = [piece.values.device for piece in pieces if piece.values.is_cuda]
        numel = sum(piece.values.numel() for piece in pieces)
        flat = torch.zeros(numel, dtype=torch.float32, pin_memory=bool(on_gpu))  # zeros, so that the first snapshot finds its pages there
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + piece.values.numel())
        self._pieces = pieces
        self._stream = torch.cuda.Stream(on_gpu[0]) if on_gpu else None
        self.pieces = [replace(piece, values=flat[ends[index] : ends[index + 1]]) for index, piece in enumerate(pieces)]

    def begin(self) -> None:
        """Says that the values are now as they are to be copied."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self) -> None:
        """Returns when the values are copied; work that GPUs are given meanwhile goes on beside it."""
        if self._stream is None:
            self._copy_all()
            return
        with torch.cuda.stream(self._stream):
            self._copy_all()
        self._stream.synchronize()

    def _copy_all(self) -> None:
        for piece, copy in zip(self._pieces, self.pieces, strict=True):
            copy.values.copy_(piece.values, non_blocking=True)
