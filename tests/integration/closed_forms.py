"""What a step of the tiny GPT of `runs.py` must move and keep, written straight from the definition of units, slices and uses."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

LAYERS, HIDDEN, FFN, VOCAB, POSITIONS, BLOCK = 2, 32, 128, 104, 16, 32


@dataclass(frozen=True)
class Unit:
    """matrices: elements of each parameter of two dims; vectors: of all others. climbs: per micro-batch where weights rest primary."""

    matrices: tuple[int, ...]
    vectors: int
    climbs: int

    def slice_numel(self, world_size: int) -> int:
        """Elements of one primary slice: each region padded to whole blocks for every rank, each matrix beginning at a block."""
        blocks = sum(ceil(numel / BLOCK) * BLOCK for numel in self.matrices)
        return sum(ceil(numel / (world_size * BLOCK)) * BLOCK for numel in (blocks, self.vectors))


def units(*, is_tied: bool) -> list[Unit]:
    block = Unit(
        (3 * HIDDEN * HIDDEN, HIDDEN * HIDDEN, FFN * HIDDEN, HIDDEN * FFN), 3 * HIDDEN + HIDDEN + FFN + HIDDEN + 4 * HIDDEN, climbs=2
    )
    embedding = Unit((VOCAB * HIDDEN, POSITIONS * HIDDEN), 0, climbs=2 if is_tied else 1)
    head = [] if is_tied else [Unit((VOCAB * HIDDEN,), 0, climbs=1)]
    return [embedding, *[block] * LAYERS, Unit((), 2 * HIDDEN, climbs=1), *head]


def inter_node_bytes(stage: int, *, nodes: int, ranks_per_node: int, microbatches: int, element_bytes: int, is_tied: bool) -> int:
    """Bytes entering one node per step: each of its ranks receives, per crossing of a unit, one slice from each other node."""
    total = 0
    for unit in units(is_tied=is_tied):
        slice_numel = unit.slice_numel(nodes * ranks_per_node)
        gradient, mean = element_bytes * slice_numel, 4 * slice_numel
        weights = element_bytes * slice_numel
        total += {
            0: gradient + mean,
            1: gradient + weights,
            2: microbatches * gradient + weights,
            3: microbatches * (gradient + unit.climbs * weights),
        }[stage]
    return total * (nodes - 1) * ranks_per_node


def padded_numel(world_size: int, *, is_tied: bool) -> int:
    """Elements of the whole model with its padding."""
    return world_size * sum(unit.slice_numel(world_size) for unit in units(is_tied=is_tied))
