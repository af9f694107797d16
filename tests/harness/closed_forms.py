"""What a step of a small model must move and keep, written straight from the definition of units, slices and uses.

The tiny GPT is that of `tiny_runs.py`, the small model that of `small_engine.py`.
"""

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
    block: int = BLOCK

    def slice_shape(self, world_size: int) -> tuple[int, int]:
        """Elements of one primary slice by region: each padded to whole blocks for every rank, each matrix beginning at a block."""
        block = self.block
        blocks = sum(ceil(numel / block) * block for numel in self.matrices)
        matrices, vectors = (ceil(numel / (world_size * block)) * block for numel in (blocks, self.vectors))
        return matrices, vectors


def units(*, is_tied: bool) -> list[Unit]:
    block = Unit(
        (3 * HIDDEN * HIDDEN, HIDDEN * HIDDEN, FFN * HIDDEN, HIDDEN * FFN), 3 * HIDDEN + HIDDEN + FFN + HIDDEN + 4 * HIDDEN, climbs=2
    )
    embedding = Unit((VOCAB * HIDDEN, POSITIONS * HIDDEN), 0, climbs=2 if is_tied else 1)
    head = [] if is_tied else [Unit((VOCAB * HIDDEN,), 0, climbs=1)]
    return [embedding, *[block] * LAYERS, Unit((), 2 * HIDDEN, climbs=1), *head]


def small_units(inner: tuple[int, ...], hidden: int, vocab: int, *, is_tied: bool, block: int) -> list[Unit]:
    """Those of the small model: the embedding, a block per width of `inner`, the final norm, the head."""
    blocks = [Unit((width * hidden, hidden * width), 3 * hidden + width, 2, block) for width in inner]
    embedding = Unit((vocab * hidden,), 0, 2 if is_tied else 1, block)
    head = [] if is_tied else [Unit((vocab * hidden,), 0, 1, block)]
    return [embedding, *blocks, Unit((), 2 * hidden, 1, block), *head]


@dataclass(frozen=True)
class Features:
    """Which of ZeRO++ is on: bits of a weight and of a gradient (16 stands for the working precision), and the secondary copy."""

    weight_bits: int = 16
    keeps_secondary: bool = False
    gradient_bits: int = 16


def payload_bytes(unit: Unit, world_size: int, bits: int, element_bytes: int) -> int:
    """One slice on its way: codes and fp32 scales of the matrices, or their values, then the vectors; each part padded to 16 bytes."""
    matrices, vectors = unit.slice_shape(world_size)
    if bits == 16:
        return padded(matrices * element_bytes) + padded(vectors * element_bytes)
    return padded(matrices * bits // 8) + padded(matrices // unit.block * 4) + padded(vectors * element_bytes)


def padded(nbytes: int) -> int:
    return ceil(nbytes / 16) * 16


@dataclass(frozen=True)
class World:
    nodes: int
    ranks_per_node: int

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node


def inter_node_bytes(
    world: World, stage: int, *, microbatches: int, element_bytes: int, is_tied: bool = True, features: Features = Features()
) -> int:
    """Bytes entering one node per step: each of its ranks receives, per crossing of a unit, one slice from each other node."""
    total = 0
    for unit in units(is_tied=is_tied):
        weights = payload_bytes(unit, world.size, features.weight_bits, element_bytes)
        gradient = payload_bytes(unit, world.size, features.gradient_bits, element_bytes)
        climbs = 1 if features.keeps_secondary else microbatches * unit.climbs
        total += {
            0: gradient + payload_bytes(unit, world.size, 16, 4),  # the fp32 mean climbs back
            1: gradient + weights,
            2: microbatches * gradient + weights,
            3: microbatches * gradient + climbs * weights,
        }[stage]
    return total * (world.nodes - 1) * world.ranks_per_node


def padded_numel(world_size: int, *, is_tied: bool) -> int:
    """Elements of the whole model with its padding."""
    return world_size * sum(sum(unit.slice_shape(world_size)) for unit in units(is_tied=is_tied))
