"""The ZeRO family as one table: a member is a row that says on which rung each state rests, and how it crosses a link (no torch).

The engine reads the row and nothing else; a row that no flag offers works as well.

                  optimizer  gradients  weights between steps  weights in step  weight bits  gradient bits
    ZeRO-0        full       full       full                   full             -            16, then fp32 climbs
    ZeRO-1        primary    full       full                   full             16           16
    ZeRO-2        primary    primary    full                   full             16           16
    ZeRO-3        primary    primary    primary                primary          16           16
    + qwZ                                                                       8
    + hpZ                                                      secondary
    + qgZ                                                                                    4 / 4
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class Rung(enum.IntEnum):
    """How far a state is spread, from one slice per rank up to the whole unit on every rank."""

    PRIMARY = 0  # 1/W on every rank
    SECONDARY = 1  # 1/G on every rank, the same in every node
    FULL = 2  # the whole unit on every rank


@dataclass(frozen=True)
class LinkBits:
    """Bits of a value while it crosses each link; 16 stands for the working precision, also where that is fp32."""

    inter: int = 16
    intra: int = 16


@dataclass(frozen=True)
class CodeOptions:
    """How values of fewer than 16 bits are coded.

    is_rotated: a Hadamard transform over 32 neighbours comes before, so that no outlier sets the scale of its whole block.
    is_stochastic: a value is rounded up with the probability of its distance from the code below, so that errors have the mean 0.
    """

    is_rotated: bool = False
    is_stochastic: bool = False


@dataclass(frozen=True)
class Policy:
    """One row: where states rest and how they cross.

    optimizer: PRIMARY, or FULL where every rank updates every weight.
    gradients: between micro-batches; fp32 sums.
    weights_between_steps, weights_in_step: after the optimizer step, and between the uses within a step.
    Raises ValueError for a combination that has no meaning.
    """

    optimizer: Rung
    gradients: Rung
    weights_between_steps: Rung
    weights_in_step: Rung
    weight_bits: LinkBits = LinkBits()
    gradient_bits: LinkBits = LinkBits()
    gradient_options: CodeOptions = CodeOptions()

    def __post_init__(self) -> None:
        if self.optimizer is Rung.SECONDARY:
            raise ValueError("the optimizer rests on the primary or the full rung; choose one of these")
        if self.optimizer is Rung.FULL and (self.gradients, self.weights_in_step) != (Rung.FULL, Rung.FULL):
            raise ValueError("an optimizer on the full rung needs gradients and weights on the full rung")
        if self.weights_in_step < self.weights_between_steps:
            raise ValueError(f"weights that rest on the {self.weights_between_steps.name} rung between steps cannot rest lower within one")

    def in_full_precision(self) -> Policy:
        """The same row with the working precision on every link."""
        return replace(self, weight_bits=LinkBits(), gradient_bits=LinkBits())


POLICIES: dict[int, Policy] = {
    0: Policy(Rung.FULL, Rung.FULL, Rung.FULL, Rung.FULL),
    1: Policy(Rung.PRIMARY, Rung.FULL, Rung.FULL, Rung.FULL),
    2: Policy(Rung.PRIMARY, Rung.PRIMARY, Rung.FULL, Rung.FULL),
    3: Policy(Rung.PRIMARY, Rung.PRIMARY, Rung.PRIMARY, Rung.PRIMARY),
}


def with_quantized_weights(policy: Policy, bits: int = 8) -> Policy:
    """qwZ: both links carry the same bytes, encoded once."""
    return replace(policy, weight_bits=LinkBits(bits, bits))


def with_secondary_weights(policy: Policy) -> Policy:
    """hpZ: what the climb over the inter link has brought is kept until the optimizer step."""
    return replace(policy, weights_in_step=Rung.SECONDARY)


def with_quantized_gradients(policy: Policy, intra_bits: int = 4, inter_bits: int = 4, options: CodeOptions = CodeOptions()) -> Policy:
    """qgZ: gradients as integers over both links, summed in fp32 between them."""
    return replace(policy, gradient_bits=LinkBits(inter_bits, intra_bits), gradient_options=options)
