"""Checks that ranks which share layers read the same samples. With different ones they would train, and learn nothing right."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.zero.engine import ZeroEngine


def same_samples_check(engine: ZeroEngine) -> Callable[[MicroBatch], None] | None:
    """A check of one micro-batch, which every rank must call at the same point; None if no ranks share layers.

    It raises RuntimeError on every rank if two of the ranks that share layers have different micro-batches, and names them.
    """
    grid = engine.ladder.grid
    if grid.tensor_ranks == 1:
        return None

    def check(batch: MicroBatch) -> None:
        own = torch.tensor([checksum(batch), batch.first_sample], dtype=torch.float64, device=engine.device)
        for data_rank, rows in enumerate(engine.gather_world(own).tolist()):
            for tensor_rank, row in enumerate(rows):
                if row != rows[0]:
                    first, other = (grid.rank_of(data_rank, place) for place in (0, tensor_rank))
                    raise RuntimeError(
                        f"ranks {first} and {other} share layers (--tensor-model-parallel-size {grid.tensor_ranks}), but their "
                        f"micro-batches differ: {_in_words(rows[0])} on rank {first}, {_in_words(row)} on rank {other}; they must read "
                        "the same data files in the same order"
                    )

    return check


def checksum(batch: MicroBatch) -> int:
    """The CRC-32 of a micro-batch's tokens and labels, which is the same on every machine."""
    return zlib.crc32(batch.labels.numpy().tobytes(), zlib.crc32(batch.tokens.numpy().tobytes()))


def _in_words(row: list[float]) -> str:
    crc, first_sample = map(int, row)
    return f"from sample {first_sample} on with checksum {crc:08x}"
