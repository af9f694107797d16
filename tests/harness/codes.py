"""Codes of links, said in bits: 16 for values that cross as they are."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.comm.code import EXACT, Code, LinkCodes, Rotation, Rounding


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
