"""Checks that ranks which share layers or samples read the same ones. With different ones they would train, and learn nothing right."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.zero.engine import ZeroEngine

Row = TypeVar("Row")


class SameSamples:
    """Compares the first micro-batch of a set at once, and all that were read with the numbers that ranks exchange in every step.

    An error is a RuntimeError that names two ranks which share samples and have read different ones; it is raised on every rank.
    If no ranks share layers or samples, there is nothing to do.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        grid = engine.ladder.grid
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

    def reader_of_another_set(self) -> Callable[[MicroBatch], None]:
        """`read` of a check of its own."""
        return SameSamples(self._engine).read

    @property
    def numbers(self) -> list[float]:
        """What this rank adds to the numbers of a step: one, or none if there is nothing to compare."""
        return [] if self._group == 1 else [self._checksum]

    def compare(self, checksums: Sequence[float]) -> None:
        """checksums: `numbers` of every rank, in the order of ranks."""
        if self._group > 1:
            self._compare(checksums, _of_all)

    def _compare(self, rows: Sequence[Row], in_words: Callable[[Row], str]) -> None:
        grid = self._engine.ladder.grid
        for rank, row in enumerate(rows):
            first = rank - rank % self._group
            if row != rows[first]:
                flags = {"layers (--tensor-model-parallel-size": grid.tensor_ranks, "samples (--context-parallel-size": grid.context_ranks}
                shared = " and ".join(f"{what} {ranks})" for what, ranks in flags.items() if ranks > 1)
                raise RuntimeError(
                    f"ranks {first} and {rank} share {shared}, but their micro-batches differ: {in_words(rows[first])} on rank {first}, "
                    f"{in_words(row)} on rank {rank}; they must read the same data files in the same order"
                )


def checksum(batch: MicroBatch, before: int = 0) -> int:
    """The CRC-32 of a micro-batch's tokens and labels, which is the same on every machine. before: that of what comes before them."""
    return zlib.crc32(batch.labels.numpy().tobytes(), zlib.crc32(batch.tokens.numpy().tobytes(), before))


def _of_first(row: list[float]) -> str:
    crc, first_sample = map(int, row)
    return f"from sample {first_sample} on with checksum {crc:08x}"


def _of_all(crc: float) -> str:
    return f"checksum {int(crc):08x} of all so far"
