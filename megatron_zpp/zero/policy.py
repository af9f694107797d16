"""The ZeRO family as one table: each row says on which rung a state is kept and how its values cross a link (no torch).

The engine reads nothing but its row, so a row that no combination of flags gives works as well.

                  optimizer  gradients  weights in step  weights cross as  gradients cross as
    ZeRO-0        full       full       full             -                 16 bits, then fp32 climbs
    ZeRO-1        primary    full       full             16 bits           16 bits
    ZeRO-2        primary    primary    full             16 bits           16 bits
    ZeRO-3        primary    primary    primary          16 bits           16 bits
    + qwZ                                                8 bits
    + hpZ                               secondary
    + qgZ                                                                  4 bits
    + summed on secondary    secondary
    + differences                       kept             difference
    + offload     host

"16 bits" means the working dtype, which is fp32 in a run without --bf16 and --fp16. An optimizer step makes the working weights stale on
every rung; a rung is filled again when it is next needed.

"Kept" means that the weights in step stay across steps too, as a copy that each step brings up to date: the owner of a slice sends the
difference between its main weights and its part of the copy, and every rank adds what it decodes (zero/kept_copy.py). What a code loses is
part of the next difference. Differences cross the inter link alone; inside a partition the copy crosses in the working dtype. The row
"summed on secondary" adds up the gradients of the micro-batches of a step inside each partition, so that they cross the inter link once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from megatron_zpp.comm.code import Code, LinkCodes
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.system.user_error import UserError

# The states of a parameter, by the names that checkpoints have: the fp32 main weight, Adam's moments, and the copy, in the working dtype,
# to which differences of weights are added.
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
KEPT_WEIGHT = "kept_weight"


class Rung(enum.IntEnum):
    """How much of a state each rank holds, from one slice up to the whole unit."""

    HOST = -1  # 1/D in the memory of every rank's host
    PRIMARY = 0  # 1/D on every rank, for D data ranks
    SECONDARY = 1  # 1/G on every rank, the same in every partition
    FULL = 2  # the whole unit on every rank

    def slices(self, topology: Topology) -> int:
        """Number of primary slices on each rank."""
        return {Rung.HOST: 1, Rung.PRIMARY: 1, Rung.SECONDARY: topology.partitions, Rung.FULL: topology.data_ranks}[self]


@dataclass(frozen=True)
class Policy:
    """One row: the rung on which each state is kept, and how its values cross the links.

    optimizer: main weights and moments. PRIMARY: each rank updates its own slice. FULL: every rank updates every weight. HOST: each rank
    updates its own slice on the host, to which the sums of gradients descend; from there weights climb as payloads.
    gradients: the fp32 sums between micro-batches.
    weights_in_step: the working weights between the uses within a step. keeps_copy: whether they are kept across steps as well, so that
    differences cross the inter link, in its weight code.
    Raises UserError for a combination without meaning.
    """

    optimizer: Rung
    gradients: Rung
    weights_in_step: Rung
    weight_codes: LinkCodes = LinkCodes()
    gradient_codes: LinkCodes = LinkCodes()
    keeps_copy: bool = False

    def __post_init__(self) -> None:
        if self.optimizer is Rung.SECONDARY:
            raise UserError("the optimizer state is kept on the host, the primary or the full rung; choose one of these")
        if Rung.HOST in (self.gradients, self.weights_in_step):
            raise UserError("only the optimizer state can be kept on the host; choose another rung for gradients and weights")
        if self.optimizer is Rung.FULL and (self.gradients, self.weights_in_step) != (Rung.FULL, Rung.FULL):
            raise UserError("an optimizer on the full rung needs gradients and weights on the full rung")
        if self.keeps_copy and (self.weights_in_step is Rung.PRIMARY or self.optimizer is Rung.FULL):
            raise UserError("a copy of the weights is kept on the secondary or the full rung, beside an optimizer that has one slice")
        if self.keeps_copy and not self.weight_codes.intra.is_exact:
            raise UserError("a kept copy of the weights crosses the intra link exactly; only differences between partitions are coded")

    def in_world(self, topology: Topology) -> Policy:
        """The same row with the codes to use on a ladder of this topology (LinkCodes.in_world).

        A code of differences stays on the inter link. If there is one partition, nothing crosses that link: no copy is kept across steps,
        and weights cross the intra link exactly.
        """
        gradient_codes = self.gradient_codes.in_world(topology)
        if not self.keeps_copy:
            return replace(self, weight_codes=self.weight_codes.in_world(topology), gradient_codes=gradient_codes)
        if topology.partitions == 1:
            return replace(self, weight_codes=LinkCodes(), gradient_codes=gradient_codes, keeps_copy=False)
        return replace(self, gradient_codes=gradient_codes)

    @property
    def sends_differences(self) -> bool:
        """Whether differences from a kept copy cross the inter link; not in a row in full precision."""
        return self.keeps_copy and not self.weight_codes.inter.is_exact

    def copies_main_weights(self, topology: Topology) -> bool:
        """Whether the full rung is a copy of main weights that every rank has on its device, so that no hop fills it."""
        return self.optimizer is Rung.FULL or (topology.is_one_rank and self.optimizer is Rung.PRIMARY)

    def keeps_payloads(self, *, encoding_is_costly: bool) -> bool:
        """Whether a rank keeps the payload of its own slice, so that a unit that climbs several times in a step is encoded only once.

        encoding_is_costly: whether it costs more than a copy on the device. An optimizer on the host makes every encoding costly.
        """
        return (encoding_is_costly or self.optimizer is Rung.HOST) and self.weights_in_step is Rung.PRIMARY

    def for_frozen(self) -> Policy:
        """The row of weights that no step changes. The rung that is kept in a step stays once it is filled, so it is filled exactly."""
        return self if self.weights_in_step is Rung.PRIMARY else replace(self, weight_codes=LinkCodes(), keeps_copy=False)

    def in_full_precision(self) -> Policy:
        """The same row with the working dtype on every link."""
        return replace(self, weight_codes=LinkCodes(), gradient_codes=LinkCodes())


POLICIES: dict[int, Policy] = {
    0: Policy(Rung.FULL, Rung.FULL, Rung.FULL),
    1: Policy(Rung.PRIMARY, Rung.FULL, Rung.FULL),
    2: Policy(Rung.PRIMARY, Rung.PRIMARY, Rung.FULL),
    3: Policy(Rung.PRIMARY, Rung.PRIMARY, Rung.PRIMARY),
}


def with_offloaded_optimizer(policy: Policy) -> Policy:
    """The row with main weights and moments kept and updated on the host. Raises UserError if every rank has all of them."""
    if policy.optimizer is Rung.FULL:
        raise UserError("an optimizer on the full rung has no owner of a slice to update it on the host; choose ZeRO stage 1, 2 or 3")
    return replace(policy, optimizer=Rung.HOST)


def with_quantized_weights(policy: Policy, code: Code = Code(8)) -> Policy:
    """The row with qwZ (ZeRO++, arXiv 2306.10209): weights cross both links as the same integers, encoded once."""
    return replace(policy, weight_codes=LinkCodes(code, code))


def with_secondary_weights(policy: Policy) -> Policy:
    """The row with hpZ (ZeRO++, arXiv 2306.10209): the secondary rung is kept until the optimizer step."""
    return replace(policy, weights_in_step=Rung.SECONDARY)


def with_weight_differences(policy: Policy, code: Code) -> Policy:
    """The row whose weights in step are kept across steps; their differences cross the inter link in `code`."""
    return replace(policy, weight_codes=LinkCodes(code), keeps_copy=True)


def with_gradients_summed_on_secondary(policy: Policy) -> Policy:
    """The row whose gradients cross the inter link once per step, after the last micro-batch."""
    return replace(policy, gradients=Rung.SECONDARY)


def with_quantized_gradients(policy: Policy, codes: LinkCodes = LinkCodes(Code(4), Code(4))) -> Policy:
    """The row with qgZ (ZeRO++, arXiv 2306.10209): gradients cross both links as integers, and are averaged in fp32 after each."""
    return replace(policy, gradient_codes=codes)


ZEROPP = with_quantized_gradients(with_secondary_weights(with_quantized_weights(POLICIES[3])))

# Fewest bytes between nodes: 3 bits both ways. Its codes need block_numel to be a multiple of 256.
LEAN = with_quantized_gradients(
    with_weight_differences(with_secondary_weights(POLICIES[3]), Code.gaussian(3, rounds=1)),
    LinkCodes(Code.gaussian(3, rounds=1), Code(8)),
)
