"""A copy of this rank's state in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_zpp.zero.pieces import Piece


class HostSnapshot:
    """Host memory for the values of `pieces`, pinned where they are on a GPU; it is taken once and filled again for every checkpoint."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        is_on_gpu = any(piece.values.is_cuda for piece in pieces)
        numel = sum(piece.values.numel() for piece in pieces)
        flat = torch.zeros(numel, dtype=torch.float32, pin_memory=is_on_gpu)  # zeros, so that the first snapshot finds its pages there
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + piece.values.numel())
        self._pieces = pieces
        self._is_on_gpu = is_on_gpu
        self.pieces = [replace(piece, values=flat[ends[index] : ends[index + 1]]) for index, piece in enumerate(pieces)]

    def take(self) -> None:
        """Copies the values as they are now; returns when they are there."""
        for piece, copy in zip(self._pieces, self.pieces, strict=True):
            copy.values.copy_(piece.values, non_blocking=True)
        if self._is_on_gpu:
            torch.cuda.current_stream().synchronize()
