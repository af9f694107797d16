"""Checks that ranks which share layers or samples read the same ones. With different ones they would train, and learn nothing right."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.zero.engine import ZeroEngine


def same_samples_check(engine: ZeroEngine) -> Callable[[MicroBatch], None] | None:
    """A check of one micro-batch of whole samples, which every rank must call at the same point; None if no ranks share layers or samples.

    It raises RuntimeError on every rank if two of the ranks that share them have different micro-batches, and names them.
    """
    grid = engine.ladder.grid
    if grid.tensor_ranks == grid.context_ranks == 1:
        return None
    flags = {"layers (--tensor-model-parallel-size": grid.tensor_ranks, "samples (--context-parallel-size": grid.context_ranks}
    shared = " and ".join(f"{what} {ranks})" for what, ranks in flags.items() if ranks > 1)

    def check(batch: MicroBatch) -> None:
        own = torch.tensor([checksum(batch), batch.first_sample], dtype=torch.float64, device=engine.device)
        rows = engine.gather_world(own).flatten(0, 1).tolist()  # in the order of ranks
        for rank, row in enumerate(rows):
            first = rank - rank % (grid.context_ranks * grid.tensor_ranks)
            if row != rows[first]:
                raise RuntimeError(
                    f"ranks {first} and {rank} share {shared}, but their micro-batches differ: {_in_words(rows[first])} on rank {first}, "
                    f"{_in_words(row)} on rank {rank}; they must read the same data files in the same order"
                )

    return check


def checksum(batch: MicroBatch) -> int:
    """The CRC-32 of a micro-batch's tokens and labels, which is the same on every machine."""
    return zlib.crc32(batch.labels.numpy().tobytes(), zlib.crc32(batch.tokens.numpy().tobytes()))


def _in_words(row: list[float]) -> str:
    crc, first_sample = map(int, row)
    return f"from sample {first_sample} on with checksum {crc:08x}"
