"""Codes of links, said in bits: 16 for values that cross as they are."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.comm.code import EXACT, Code, LinkCodes, Rotation, Rounding
from megatron_zpp.zero.policy import POLICIES, Policy, with_quantized_gradients, with_secondary_weights, with_weight_differences


@dataclass(frozen=True)
class CodeOptions:
    """Of codes that quantize."""

    is_rotated: bool = False
    is_stochastic: bool = False


@dataclass(frozen=True)
class LinkBits:
    """Bits of a value on each link."""

    inter: int = 16
    intra: int = 16

    def codes(self, options: CodeOptions = CodeOptions()) -> LinkCodes:
        return LinkCodes(code(self.inter, options), code(self.intra, options))


def code(bits: int, options: CodeOptions = CodeOptions()) -> Code:
    """The code of so many bits."""
    if bits == 16:
        return EXACT
    rotation = Rotation.HADAMARD if options.is_rotated else Rotation.NONE
    return Code(bits, rotation, Rounding.STOCHASTIC if options.is_stochastic else Rounding.NEAREST)


def bits_of(codes: LinkCodes) -> LinkBits:
    inter, intra = (16 if some.bits is None else some.bits for some in (codes.inter, codes.intra))
    return LinkBits(inter, intra)


def lean(stage: int, bits: int = 3) -> Policy:
    """The row of a stage with weight differences in Gaussian codes of so many bits. Gradients have 3 bits, and 8 inside a partition."""
    policy = with_secondary_weights(POLICIES[3]) if stage == 3 else POLICIES[stage]
    gradients = LinkCodes(Code.gaussian(3, rounds=1), Code(8))
    return with_quantized_gradients(with_weight_differences(policy, Code.gaussian(bits, rounds=1)), gradients)
