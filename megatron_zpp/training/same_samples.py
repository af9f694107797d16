"""Checks that ranks which share layers or samples read the same ones. With different ones they would train, and learn nothing right."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.zero.engine import ZeroEngine

Row = TypeVar("Row")


def same_samples_check(engine: ZeroEngine) -> SameSamples | None:
    """The check for one set of samples; None if no ranks share layers or samples."""
    grid = engine.ladder.grid
    return None if grid.tensor_ranks == grid.context_ranks == 1 else SameSamples(engine)


class SameSamples:
    """Compares the first micro-batch of a set at once, and all that were read with the numbers that ranks exchange in every step.

    An error is a RuntimeError that names two ranks which share samples and have read different ones; it is raised on every rank.
    checksum: of all micro-batches so far.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self.checksum = 0
        self._engine = engine
        self._is_first = True

    def read(self, batch: MicroBatch) -> None:
        """Takes note of a micro-batch of whole samples. With the first one every rank must call it at the same point."""
        self.checksum = checksum(batch, self.checksum)
        if self._is_first:
            own = torch.tensor([self.checksum, batch.first_sample], dtype=torch.float64, device=self._engine.device)
            self._compare(self._engine.gather_world(own).flatten(0, 1).tolist(), _of_first)
            self._is_first = False

    def compare(self, checksums: Sequence[float]) -> None:
        """checksums: `checksum` of every rank, in the order of ranks."""
        self._compare(checksums, _of_all)

    def _compare(self, rows: Sequence[Row], in_words: Callable[[Row], str]) -> None:
        grid = self._engine.ladder.grid
        for rank, row in enumerate(rows):
            first = rank - rank % (grid.context_ranks * grid.tensor_ranks)
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
