"""Tensors in chunks, as the format `torch_dist` stores them: each chunk is a file of torch.save inside of a larger file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from megatron_zpp.checkpoint.megatron.torch_file import NOT_READ, TorchFile
from megatron_zpp.checkpoint.megatron.window import Window
from megatron_zpp.system.user_error import UserError


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file."""

    path: Path
    start: int
    nbytes: int

    def opened(self) -> TorchFile:
        return TorchFile(Window(self.path, self.start, self.nbytes))


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: it begins at `offsets` and has `sizes`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: FileRange

    def region(self) -> tuple[slice, ...]:
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor of the checkpoint in `folder`, or one layer of a tensor of all layers."""

    folder: Path
    name: str
    whole_shape: tuple[int, ...]
    chunks: Sequence[Chunk]
    layer: int | None = None

    @property
    def where(self) -> str:
        return f"{self.name}{'' if self.layer is None else f' [{self.layer}]'} in {self.folder}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole_shape if self.layer is None else self.whole_shape[1:]

    def read(self) -> Tensor:
        """The values. Raises UserError unless each of them is in exactly one chunk."""
        values: Tensor | None = None
        filled = torch.zeros(self.shape, dtype=torch.bool)
        for chunk in self.chunks:
            box = chunk.region()
            if self.layer is not None and not box[0].start <= self.layer < box[0].stop:
                continue
            found = self._values_of(chunk)
            if self.layer is not None:
                found, box = found[self.layer - box[0].start], box[1:]
            values = torch.empty(self.shape, dtype=found.dtype) if values is None else values
            if values.dtype != found.dtype or filled[box].any():
                self._refuse("has chunks that overlap, or of different types")
            values[box] = found
            filled[box] = True
        if values is None or not filled.all():
            self._refuse("lacks chunks")
        return values

    def _values_of(self, chunk: Chunk) -> Tensor:
        file = chunk.place.opened()
        place = file.place_of(file.root)
        if place is None:
            raise UserError(f"{self.where} {NOT_READ}.")
        if place.shape != chunk.sizes or len(chunk.offsets) != len(self.whole_shape):
            self._refuse("has a chunk of another shape than .metadata says")
        if any(box.stop > size for box, size in zip(chunk.region(), self.whole_shape, strict=True)) or math.prod(place.shape) == 0:
            self._refuse("has a chunk that is not inside of it")
        return file.read(place)

    def _refuse(self, finding: str) -> NoReturn:
        raise UserError(f"{self.where} {finding}; copy the whole checkpoint.")
