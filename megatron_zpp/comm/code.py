"""Describes the form in which values cross a link (no torch); comm/codecs.py implements it.

A payload holds the values of one slice:

    | blocks, coded | exact values, never quantized |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_zpp.ops.payload import BITS, GAUSSIAN_BITS, GAUSSIAN_ROUNDS, coded_bytes, gaussian_bytes, padded_bytes
from megatron_zpp.parallel.topology import Link, Topology
from megatron_zpp.system.user_error import UserError


class Rotation(enum.Enum):
    """How values are mixed before they are quantized. HADAMARD: every 32 neighbours, which spreads an outlier over them."""

    NONE = "none"
    HADAMARD = "hadamard"


class Rounding(enum.Enum):
    """How a value becomes an integer. STOCHASTIC: up with a probability equal to its distance from the lower integer."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class Levels(enum.Enum):
    """Which numbers stand for the values of a block. UNIFORM: integers, times the largest magnitude. GAUSSIAN: levels with the least error
    for a Gaussian, times the root mean square, after a rotation of every 256 neighbours with random signs (ops/gaussian_reference.py).
    """

    UNIFORM = "uniform"
    GAUSSIAN = "gaussian"


@dataclass(frozen=True)
class SliceShape:
    """How many elements a slice has in each of its two regions."""

    blocks: int
    exact: int

    @property
    def numel(self) -> int:
        return self.blocks + self.exact


@dataclass(frozen=True)
class Code:
    """How the blocks of a slice cross a link.

    bits: of each value: 4 or 8, and 1 to 4 with Gaussian levels. None: values are not quantized, but cross in a floating-point dtype that
    the codec is given.
    rounds: of the rotation before Gaussian levels. Two leave no bias. One leaves some where few values of a block are not 0, but has less
    error there. So one suits differences that feed their error back, two suit means over many ranks.
    Raises UserError for other bits, for a rotation or stochastic rounding without bits or with Gaussian levels, and for other rounds.
    """

    bits: int | None = None
    rotation: Rotation = Rotation.NONE
    rounding: Rounding = Rounding.NEAREST
    levels: Levels = Levels.UNIFORM
    rounds: int = 0

    def __post_init__(self) -> None:
        if self.levels is Levels.GAUSSIAN:
            self._check_gaussian()
            return
        if self.bits is None and (self.rotation, self.rounding) != (Rotation.NONE, Rounding.NEAREST):
            raise UserError("values that are not quantized can be neither rotated nor rounded; choose 4 or 8 bits, or neither option")
        if self.bits is not None and self.bits not in BITS:
            raise UserError(f"{self.bits} bits per value are not available; choose 4 or 8, or None for values that are not quantized")
        if self.rounds:
            raise UserError(f"{self.rounds} rounds of rotation need Gaussian levels; choose these, or 0 rounds")

    @classmethod
    def gaussian(cls, bits: int, rounds: int) -> Code:
        """The code with Gaussian levels, of 1 to 4 bits, after one or two rounds of rotation."""
        return cls(bits, levels=Levels.GAUSSIAN, rounds=rounds)

    def _check_gaussian(self) -> None:
        if self.bits not in GAUSSIAN_BITS:
            raise UserError(f"{self.bits} bits per value are not available with Gaussian levels; choose 1, 2, 3 or 4")
        if self.rounds not in GAUSSIAN_ROUNDS:
            raise UserError(f"{self.rounds} rounds of rotation are not available with Gaussian levels; choose 1 or 2")
        if (self.rotation, self.rounding) != (Rotation.NONE, Rounding.NEAREST):
            raise UserError("Gaussian levels have a rotation of their own and the nearest level; choose no other rotation or rounding")

    @property
    def is_exact(self) -> bool:
        """Whether values cross without being quantized."""
        return self.bits is None

    @property
    def mixes_neighbours(self) -> bool:
        """Whether the error of a value spreads to its neighbours, which may be padding."""
        return self.rotation is not Rotation.NONE or self.levels is Levels.GAUSSIAN

    def blocks_bytes(self, numel: int, *, element_bytes: int, block_numel: int = 1) -> int:
        """Bytes of blocks of `numel` values. The exact values begin after them.

        element_bytes: of a value that is not quantized. block_numel: number of values that share a scale; with Gaussian levels it is 256.
        """
        if self.bits is None:
            return padded_bytes(numel * element_bytes)
        return gaussian_bytes(numel, self.bits) if self.levels is Levels.GAUSSIAN else coded_bytes(numel, self.bits, block_numel)

    def payload_bytes(self, slice_shape: SliceShape, *, element_bytes: int, block_numel: int = 1) -> int:
        """Bytes of one slice's payload, a multiple of 16; arguments as in `blocks_bytes`."""
        blocks = self.blocks_bytes(slice_shape.blocks, element_bytes=element_bytes, block_numel=block_numel)
        return blocks + padded_bytes(slice_shape.exact * element_bytes)


EXACT = Code()


@dataclass(frozen=True)
class LinkCodes:
    """The code of each link, in one direction."""

    inter: Code = EXACT
    intra: Code = EXACT

    @property
    def are_alike(self) -> bool:
        """Whether a payload that came over one link crosses the other unchanged."""
        return self.inter == self.intra

    def in_world(self, topology: Topology) -> LinkCodes:
        """The codes to use on a ladder of this topology.

        Nothing crosses a link of one rank. It takes the code of the other link, because a change of code between the two links would only
        add error. In a world of one rank nothing is quantized.
        """
        if topology.data_ranks == 1:
            return LinkCodes()
        if topology.link_ranks(Link.INTER) == 1:
            return LinkCodes(self.intra, self.intra)
        if topology.link_ranks(Link.INTRA) == 1:
            return LinkCodes(self.inter, self.inter)
        return self
