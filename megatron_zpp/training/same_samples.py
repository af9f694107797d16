"""Checks that ranks which share layers or divide samples read the same ones. With others they would train, and learn nothing right."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.zero.engine import ZeroEngine

Row = TypeVar("Row")


class SameSamples:
    """Compares the first micro-batch of a set at once, and all that were read with numbers that ranks exchange anyway.

    An error is a RuntimeError that names two ranks which need the same samples and have read different ones; it is raised on every rank.
    If every rank has samples of its own, there is nothing to do.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        grid = engine.links.grid
        self._group = grid.context_ranks * grid.tensor_ranks  # neighbouring ranks that read the same samples
        self._engine = engine
        self._checksum = 0  # of all micro-batches so far
        self._is_first = True

    def read(self, batch: MicroBatch) -> None:
        """Takes note of a micro-batch of whole samples. With the first one every rank must call it at the same point."""
        if self._group == 1:
            return
        self._checksum = checksum(batch, self._checksum)
        if self._is_first:
            own = torch.tensor([self._checksum, batch.first_sample], dtype=torch.float64, device=self._engine.device)
            self._compare(self._engine.gather_world(own).flatten(0, 1).tolist(), _of_first)
            self._is_first = False

    def of_another_set(self) -> SameSamples:
        """A check of its own, for the micro-batches of another set."""
        return SameSamples(self._engine)

    @property
    def numbers(self) -> list[float]:
        """What this rank adds to the numbers that ranks exchange: one, or none if there is nothing to compare."""
        return [] if self._group == 1 else [self._checksum]

    def append_to(self, numbers: Tensor) -> Tensor:
        """`numbers` [numel] with those of this check at their end: the tensor itself if there is nothing to compare."""
        return numbers if self._group == 1 else torch.cat([numbers, numbers.new_tensor(self.numbers)])

    def differ(self, checksums: Tensor) -> Tensor | None:
        """Whether `compare` would raise, [] bool on the device of `checksums`; None if there is nothing to compare.

        checksums: `numbers` of every rank, in the order of ranks.
        """
        if self._group == 1:
            return None
        by_group = checksums.reshape(-1, self._group)
        return (by_group != by_group[:, :1]).any()

    def compare(self, checksums: Sequence[float]) -> None:
        """checksums: `numbers` of every rank, in the order of ranks."""
        if self._group > 1:
            self._compare(checksums, _of_all)

    def _compare(self, rows: Sequence[Row], in_words: Callable[[Row], str]) -> None:
        grid, of_island = self._engine.links.grid, self._engine.links.ranks
        names = of_island if len(rows) == len(of_island) else range(len(rows))  # rows of an evaluation are those of all islands
        for rank, row in enumerate(rows):
            first = rank - rank % self._group
            if row != rows[first]:
                tensor = f"share layers (--tensor-model-parallel-size {grid.tensor_ranks})"
                context = f"divide samples (--context-parallel-size {grid.context_ranks})"
                why = " and ".join([tensor] * (grid.tensor_ranks > 1) + [context] * (grid.context_ranks > 1))
                one, other = (names[number] for number in (first, rank))
                raise RuntimeError(
                    f"ranks {one} and {other} {why}, but their micro-batches differ: {in_words(rows[first])} on rank {one}, "
                    f"{in_words(row)} on rank {other}; they must read the same data files in the same order"
                )


def checksum(batch: MicroBatch, before: int = 0) -> int:
    """The CRC-32 of a micro-batch's tokens and labels, which is the same on every machine. before: that of what comes before them."""
    return zlib.crc32(batch.labels.numpy().tobytes(), zlib.crc32(batch.tokens.numpy().tobytes(), before))


def _of_first(row: list[float]) -> str:
    crc, first_sample = map(int, row)
    return f"from sample {first_sample} on with checksum {crc:08x}"


def _of_all(crc: float) -> str:
    return f"checksum {int(crc):08x} of all so far"
