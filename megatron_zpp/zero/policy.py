"""The ZeRO family as one table: each row says on which rung a state rests and how it crosses a link (no torch).

The engine reads the row and nothing else, so a row that no flag offers works as well.

                  optimizer  gradients  weights in step  weights cross as  gradients cross as
    ZeRO-0        full       full       full             -                 16 bits, then fp32 climbs
    ZeRO-1        primary    full       full             16 bits           16 bits
    ZeRO-2        primary    primary    full             16 bits           16 bits
    ZeRO-3        primary    primary    primary          16 bits           16 bits
    + qwZ                                                8 bits
    + hpZ                               secondary
    + qgZ                                                                  4 bits

16 bits stand for the working dtype. An optimizer step makes every rung of weights above the optimizer's stale; it is filled again when next
needed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from megatron_zpp.comm.code import Code, LinkCodes
from megatron_zpp.parallel.topology import Topology


class Rung(enum.IntEnum):
    """How much of a state each rank holds, from one slice up to the whole unit."""

    PRIMARY = 0  # 1/W on every rank
    SECONDARY = 1  # 1/G on every rank, the same in every partition
    FULL = 2  # the whole unit on every rank

    def slices(self, topology: Topology) -> int:
        """Number of primary slices on each rank."""
        return {Rung.PRIMARY: 1, Rung.SECONDARY: topology.partitions, Rung.FULL: topology.world_size}[self]


@dataclass(frozen=True)
class Policy:
    """One row: where states rest, and how they cross the links.

    optimizer: PRIMARY, or FULL where every rank updates every weight.
    gradients: between micro-batches; fp32 sums.
    weights_in_step: between the uses within a step.
    Raises ValueError for a combination without meaning.
    """

    optimizer: Rung
    gradients: Rung
    weights_in_step: Rung
    weight_codes: LinkCodes = LinkCodes()
    gradient_codes: LinkCodes = LinkCodes()

    def __post_init__(self) -> None:
        if self.optimizer is Rung.SECONDARY:
            raise ValueError("the optimizer rests on the primary or the full rung; choose one of these")
        if self.optimizer is Rung.FULL and (self.gradients, self.weights_in_step) != (Rung.FULL, Rung.FULL):
            raise ValueError("an optimizer on the full rung needs gradients and weights on the full rung")

    def keeps_payloads(self, *, encodes: bool) -> bool:
        """Whether the primary rung keeps its payload, so that a unit that climbs from there several times a step encodes once.

        encodes: whether encoding costs more than a copy.
        """
        return encodes and self.weights_in_step is Rung.PRIMARY

    def in_full_precision(self) -> Policy:
        """The same row with the working dtype on every link."""
        return replace(self, weight_codes=LinkCodes(), gradient_codes=LinkCodes())


POLICIES: dict[int, Policy] = {
    0: Policy(Rung.FULL, Rung.FULL, Rung.FULL),
    1: Policy(Rung.PRIMARY, Rung.FULL, Rung.FULL),
    2: Policy(Rung.PRIMARY, Rung.PRIMARY, Rung.FULL),
    3: Policy(Rung.PRIMARY, Rung.PRIMARY, Rung.PRIMARY),
}


def with_quantized_weights(policy: Policy, code: Code = Code(8)) -> Policy:
    """qwZ: both links carry the same bytes, encoded once."""
    return replace(policy, weight_codes=LinkCodes(code, code))


def with_secondary_weights(policy: Policy) -> Policy:
    """hpZ: the secondary rung is kept until the optimizer step."""
    return replace(policy, weights_in_step=Rung.SECONDARY)


def with_quantized_gradients(policy: Policy, codes: LinkCodes = LinkCodes(Code(4), Code(4))) -> Policy:
    """qgZ: gradients as integers over both links, summed in fp32 between them."""
    return replace(policy, gradient_codes=codes)


ZEROPP = with_quantized_gradients(with_secondary_weights(with_quantized_weights(POLICIES[3])))
