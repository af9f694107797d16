"""A state whose parameters are divided over tensor ranks in every way, cut among the data ranks of each, saved and read back.

The rows of `qkv` are, for each of two groups: two queries, a key and a value, three rows each. Four tensor ranks have one query each, and
share keys and values in pairs. `up` has the rows of all gates, then those of all values. A row of `down` is longer than some chunks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness.run_state import run_state
from megatron_zpp.checkpoint.manifest import Manifest
from megatron_zpp.checkpoint.shard_file import DTYPES
from megatron_zpp.checkpoint.unfinished import Record, make_unfinished, seal, write_pieces
from megatron_zpp.parallel.division import Division, Gradient, HeldRange
from megatron_zpp.zero.pieces import Piece, pieces_of

SHAPES = {"words": (24, 5), "norm": (7,), "qkv": (24, 5), "qkv_bias": (24,), "projection": (5, 12), "up": (16, 5), "down": (3, 80)}
ROW, CHUNK_BYTES = 3, 64
Whole = Mapping[tuple[str, str], Tensor]


@dataclass(frozen=True)
class World:
    """T tensor ranks times D data ranks."""

    tensor_ranks: int
    data_ranks: int

    @property
    def ranks(self) -> range:
        return range(self.tensor_ranks * self.data_ranks)


def whole_state(states: Mapping[str, str]) -> Whole:
    """All elements by parameter and state. states: element types."""
    generator = torch.Generator().manual_seed(3)
    return {
        (name, state): torch.randn(shape, generator=generator).to(DTYPES[element_type])
        for name, shape in SHAPES.items()
        for state, element_type in states.items()
    }


def division_of(name: str, ranks: int, rank: int) -> Division:
    """The part of a tensor rank in a parameter."""
    shape = SHAPES[name]
    if name in ("projection", "down"):
        return Division.evenly(shape, 1, ranks, rank)
    if name in ("words", "qkv", "qkv_bias") and (ranks <= 2 or name == "words"):
        return Division.evenly(shape, 0, ranks, rank)
    if name == "norm":
        return Division.undivided(shape, ranks, rank, Gradient.PARTIAL)
    return Division(shape, 0, tuple(_gate_and_value(shape[0], ranks) if name == "up" else _four_queries()), rank, Gradient.PARTIAL)


def _gate_and_value(rows: int, ranks: int) -> Iterator[HeldRange]:
    length = rows // (2 * ranks)
    for index in range(2 * ranks):
        yield HeldRange(index * length, (index + 1) * length, (index % ranks,))


def _four_queries() -> Iterator[HeldRange]:
    for group in range(2):
        holders = (2 * group, 2 * group + 1)
        for place, of_row in enumerate([holders[:1], holders[1:], holders, holders]):
            yield HeldRange((4 * group + place) * ROW, (4 * group + place + 1) * ROW, of_row)


def part_of(whole: Tensor, division: Division) -> Tensor:
    """The flattened part of a tensor rank, by numpy's own slicing."""
    ranges = [held for held in division.ranges if division.rank in held.holders]
    bits = whole.view(torch.int32 if whole.itemsize == 4 else torch.int16).numpy()
    part = np.concatenate([np.take(bits, range(held.start, held.stop), axis=division.dim) for held in ranges], axis=division.dim)
    return torch.from_numpy(part.ravel().copy()).view(whole.dtype)


def pieces_of_rank(whole: Whole, world: World, rank: int, *, only_counted: bool) -> Iterator[Piece]:
    """The pieces of a rank, with copies of their values. only_counted: those that it saves."""
    data_rank, tensor_rank = divmod(rank, world.tensor_ranks)
    for (name, state), values in whole.items():
        division = division_of(name, world.tensor_ranks, tensor_rank)
        part = part_of(values, division)
        first, last = _slice(name, part.numel(), world, data_rank)
        left_out = [shared for shared in division.shared() if only_counted and not shared.counted]
        cuts = {place for shared in left_out for place in (shared.start, shared.stop) if first < place < last}
        for start, stop in pairwise(sorted({first, last, *cuts})):
            if not any(shared.start <= start < shared.stop for shared in left_out):
                yield from pieces_of(name, state, division, start, part[start:stop])


def _slice(name: str, numel: int, world: World, data_rank: int) -> tuple[int, int]:
    """The elements of a part that a data rank has: the part is cut anywhere."""
    places = random.Random(f"{name} {world.data_ranks}")
    cuts = sorted(places.choices(range(numel + 1), k=world.data_ranks - 1))
    ends = [0, *cuts, numel]
    return ends[data_rank], ends[data_rank + 1]


def save(folder: Path, whole: Whole, states: Mapping[str, str], world: World, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    """Writes a checkpoint into the folder, as the ranks of the world would do."""
    make_unfinished(folder)
    written = [
        write_pieces(
            folder / f"rank_{rank:05d}.safetensors", list(pieces_of_rank(whole, world, rank, only_counted=True)), states, chunk_bytes
        )
        for rank in world.ranks
    ]
    manifest = Manifest(1, 8, SHAPES, states, run_state(8), {}, {"tensor_ranks": world.tensor_ranks}, {}, chunk_bytes)
    record = Record.joined(written)
    seal(folder, replace(manifest, files=record.files, pieces=record.pieces))
    return manifest
