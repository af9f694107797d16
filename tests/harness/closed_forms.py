"""What a step of a small model must move and keep, written straight from the definition of units, slices and uses.

The tiny GPT is that of `tiny_runs.py`, the small model that of `small_engine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from harness.codes import LinkBits, lean
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import POLICIES, Policy, with_gradients_summed_on_secondary, with_secondary_weights

LAYERS, HIDDEN, FFN, VOCAB, POSITIONS, BLOCK = 2, 32, 128, 104, 16, 32


@dataclass(frozen=True)
class Unit:
    """matrices: elements of each parameter of two or more dims; vectors: of all others. climbs: per micro-batch where weights rest primary.

    trains: no for a frozen unit, which gets no gradients, and whose rungs stay fresh where they are kept within a step.
    """

    matrices: tuple[int, ...]
    vectors: int
    climbs: int
    block: int = BLOCK
    trains: bool = True

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


EXACT, INT8, INT4 = (LinkBits(bits, bits) for bits in (16, 8, 4))


@dataclass(frozen=True)
class Features:
    """A member of the family: its stage, which rungs it keeps and sums on, and in how many bits values cross (16: as they are).

    sums_on_secondary: of a step's micro-batches. is_lean: Gaussian codes cross between nodes, and the weights' are those of differences.
    """

    stage: int = 3
    keeps_secondary: bool = False
    sums_on_secondary: bool = False
    weights: LinkBits = EXACT
    gradients: LinkBits = EXACT
    is_lean: bool = False

    def policy(self) -> Policy:
        """The row of the engine with these features."""
        if self.is_lean:
            policy = lean(self.stage, self.weights.inter)
        else:
            policy = with_secondary_weights(POLICIES[self.stage]) if self.keeps_secondary else POLICIES[self.stage]
            policy = replace(policy, weight_codes=self.weights.codes(), gradient_codes=self.gradients.codes())
        return with_gradients_summed_on_secondary(policy) if self.sums_on_secondary else policy


def payload_bytes(unit: Unit, world_size: int, bits: int, element_bytes: int, *, is_gaussian: bool = False) -> int:
    """One slice on its way: scales and codes of the matrices, or their values, then the vectors; each part padded to 16 bytes.

    A block has a scale in fp32, or in bf16 if its code is Gaussian.
    """
    matrices, vectors = unit.slice_shape(world_size)
    if bits == 16:
        return padded(matrices * element_bytes) + padded(vectors * element_bytes)
    scale_bytes = 2 if is_gaussian else 4
    return padded(matrices // unit.block * scale_bytes) + padded(ceil(matrices * bits / 8)) + padded(vectors * element_bytes)


def padded(nbytes: int) -> int:
    return ceil(nbytes / 16) * 16


def step_bytes(features: Features, units: list[Unit], grid: Grid, *, microbatches: int, element_bytes: int) -> tuple[int, int]:
    """Bytes per step that enter a node, and that a rank gets from ranks of its own node; alike for every rank of a world of one ladder.

    Not of the first step of lean, in which the weights themselves cross.
    """
    over_inter = range(0, grid.world_size, grid.partition_ranks)
    over_intra = range(grid.partition_ranks)
    gradients, is_gaussian = features.gradients, features.is_lean
    weight_bytes = 4 if features.stage == 0 else element_bytes  # what climbs in stage 0 is the fp32 mean of the gradients
    entering = within = 0
    for unit in units:
        weights = features.weights
        payload = partial(payload_bytes, unit, grid.world_size)
        climbs = unit.climbs * microbatches if features.stage == 3 else 1
        climbs_over_inter = 1 if features.keeps_secondary else climbs
        descents = microbatches if features.stage > 1 else 1
        descents_over_inter = 1 if features.sums_on_secondary else descents
        if not unit.trains:
            descents = descents_over_inter = 0
            climbs = climbs if features.stage == 3 else 0
            climbs_over_inter = 0 if features.keeps_secondary else climbs
            weights = EXACT if features.keeps_secondary else weights
        messages = [
            (over_inter, payload(weights.inter, weight_bytes, is_gaussian=is_gaussian), climbs_over_inter),
            (over_intra, payload(weights.intra, weight_bytes) * len(over_inter), climbs),
            (over_intra, payload(gradients.intra, element_bytes) * len(over_inter), descents),
            (over_inter, payload(gradients.inter, element_bytes, is_gaussian=is_gaussian), descents_over_inter),
        ]
        for members, nbytes, times in messages:
            outside = sum(member >= grid.ranks_per_node for member in members)  # of the node of rank 0
            entering += times * outside * nbytes * grid.ranks_per_node
            within += times * (len(members) - 1 - outside) * nbytes
    return entering, within


def inter_node_bytes(features: Features, grid: Grid, *, microbatches: int, element_bytes: int, is_tied: bool = True) -> int:
    """Bytes that enter a node in a step of the tiny GPT."""
    return step_bytes(features, units(is_tied=is_tied), grid, microbatches=microbatches, element_bytes=element_bytes)[0]


def padded_numel(world_size: int, *, is_tied: bool) -> int:
    """Elements of the whole model with its padding."""
    return world_size * sum(sum(unit.slice_shape(world_size)) for unit in units(is_tied=is_tied))
