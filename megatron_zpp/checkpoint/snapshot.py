"""Copies this rank's state to host memory, so that a checkpoint can be written while training continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from megatron_zpp.comm.streams import Streams, streams_of
from megatron_zpp.zero.pieces import Piece


class HostSnapshot:
    """Host memory for the values of `pieces`, pinned if they are on a GPU. It is allocated once and filled for every checkpoint.

    The values must not change between `begin` and the end of `copy`. Any thread may call `copy`.
    """

    def __init__(self, pieces: Sequence[Piece], streams: Streams | None = None) -> None:
        """streams: of the device that holds the values; by default its own."""
        devices = {piece.values.device for piece in pieces}
        self._pieces = pieces
        self._streams = streams or next(filter(None, map(streams_of, devices)), None)
        self._stream = None if self._streams is None else self._streams.make()
        self.pieces = list(_copies(pieces, self._streams))

    def begin(self) -> None:
        """Marks the point in the current stream at which the values are ready to be copied."""
        if self._streams is not None and self._stream is not None:
            self._stream.wait_stream(self._streams.current())

    def copy(self) -> None:
        """Copies the values and returns when this is done. Other work on the GPU continues meanwhile."""
        if self._streams is None or self._stream is None:
            self._copy_all()
            return
        with self._streams.entered(self._stream):
            self._copy_all()
        self._stream.synchronize()

    def _copy_all(self) -> None:
        for piece, copy in zip(self._pieces, self.pieces, strict=True):
            copy.values.copy_(piece.values, non_blocking=True)


def _copies(pieces: Sequence[Piece], streams: Streams | None) -> Iterator[Piece]:
    """The pieces with values in host memory: zeros, so that its pages exist before the first snapshot."""
    numels: Counter[torch.dtype] = Counter()
    for piece in pieces:
        numels[piece.values.dtype] += piece.values.numel()
    unused = {
        dtype: torch.zeros(numel, dtype=dtype, device="cpu") if streams is None else streams.host_memory(numel, dtype)
        for dtype, numel in numels.items()
    }
    for piece in pieces:
        dtype, numel = piece.values.dtype, piece.values.numel()
        values, unused[dtype] = unused[dtype].split([numel, unused[dtype].numel() - numel])
        yield replace(piece, values=values)
