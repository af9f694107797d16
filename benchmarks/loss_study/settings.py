"""The settings that the study of loss compares: each is flags of the training script, and a change of their row that no flag offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from megatron_zpp.comm.code import EXACT, Code, LinkCodes, Rotation
from megatron_zpp.comm.codec import Codec, SignKeys
from megatron_zpp.comm.codecs import CodecFactory, make_codec
from megatron_zpp.comm.gaussian_codec import GaussianCodec
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.zero.policy import Policy, with_quantized_gradients, with_weight_differences

PAPER = "--zeropp paper"
LEAN = "--zeropp lean"
RATES = {0.5: ", half the rate", 1.0: "", 2.0: ", twice the rate", 4.0: ", four times the rate"}
ONE_BIT = "--zero-quantized-weight-differences-bits 1"


class GaussianCodecWithSharedSigns(GaussianCodec):
    """A Gaussian codec in which all senders of a link have the signs of its first member. It shows what own signs are good for."""

    def with_signs(self, keys: SignKeys) -> GaussianCodec:
        first = keys.senders[0]
        return replace(self, keys=SignKeys(first, (first,) * len(keys.senders)))


def make_codec_with_shared_signs(code: Code, dtype: torch.dtype, block_numel: int) -> Codec:
    codec = make_codec(code, dtype, block_numel)
    if isinstance(codec, GaussianCodec):
        return GaussianCodecWithSharedSigns(codec.code, codec.block_numel, codec.exact)
    return codec


def unchanged(policy: Policy) -> Policy:
    return policy


def with_two_rounds(policy: Policy) -> Policy:
    """Gradients between partitions after two rounds of rotation."""
    codes = policy.gradient_codes
    return with_quantized_gradients(policy, replace(codes, inter=replace(codes.inter, rounds=2)))


def with_even_steps(policy: Policy) -> Policy:
    """Differences and gradients in 4 bits with even steps up to the largest value; gradients rotated, in 8 bits inside partitions."""
    codes = LinkCodes(Code(4, Rotation.HADAMARD), Code(8, Rotation.HADAMARD))
    return with_quantized_gradients(with_weight_differences(policy, Code(4)), codes)


def with_absmax_gradients(policy: Policy) -> Policy:
    """Gradients with even steps and without rotation, in 8 bits inside partitions and 4 between them."""
    return with_quantized_gradients(policy, LinkCodes(Code(4), Code(8)))


def with_exact_gradients(policy: Policy) -> Policy:
    return with_quantized_gradients(policy, LinkCodes())


def with_exact_weights(policy: Policy) -> Policy:
    return replace(policy, weight_codes=LinkCodes(), keeps_copy=False)


@dataclass(frozen=True)
class Setting:
    """name: in tables. flags: of the training script. change: makes the measured row from that of the flags.

    outer: of islands, one on each node, which take plain means until the end of the warm-up; None if all ranks train as one.
    averages_moments: whether an exchange also gives all islands the mean of AdamW's moments, which no flag offers.
    rate_factor: times the usual learning rates; a gap is to the plain setting with as large a factor. perturbation: relative, of the
    learning rates, so small that nothing but the rounding of weights changes.
    """

    name: str
    flags: str = ""
    change: Callable[[Policy], Policy] = unchanged
    make_codec: CodecFactory = field(default=make_codec)
    outer: OuterOptions | None = None
    averages_moments: bool = False
    rate_factor: float = 1.0
    perturbation: float = 0.0

    def at_rate(self, factor: float) -> Setting:
        """The same with other learning rates, by RATES."""
        return replace(self, name=self.name + RATES[factor], rate_factor=factor)

    @property
    def is_plain(self) -> bool:
        return not self.flags and not self.perturbation and self.outer is None


PLAIN = Setting("ZeRO-3")
ROWS = (PLAIN, Setting("paper", PAPER), Setting("lean", LEAN))
FIRST = (
    PLAIN,
    Setting("ZeRO-3 again, rates times 1 + 1e-6", perturbation=1e-6),
    *ROWS[1:],
    Setting("lean, 1-bit differences", f"{LEAN} {ONE_BIT}"),
)
SECOND = (
    Setting("lean, two rounds for gradients", LEAN, with_two_rounds),
    Setting("lean, signs shared by senders", LEAN, make_codec=make_codec_with_shared_signs),
    Setting("4-bit absmax differences, 8/4-bit absmax gradients, rotated", LEAN, with_even_steps),
    Setting("lean, gradients in 4 bits", f"{LEAN} --zero-quantized-gradients-inter-bits 4"),
    Setting("lean, 8/4-bit absmax gradients, not rotated", LEAN, with_absmax_gradients),
    Setting("lean, gradients in 16 bits", LEAN, with_exact_gradients),
    Setting("lean, weights in 16 bits", LEAN, with_exact_weights),
)
EVERY_16 = OuterOptions(16)
EVERY_16_STEPS = Setting("islands, every 16 steps", outer=EVERY_16)
ISLANDS = (
    PLAIN,
    Setting("islands, every 16 steps, 16 bits", outer=replace(EVERY_16, gradient_code=EXACT, difference_code=EXACT)),
    EVERY_16_STEPS,
    Setting("islands, every 16 steps, one step late", outer=replace(EVERY_16, overlap_steps=1)),
    Setting("islands, every 16 steps, moments averaged", outer=EVERY_16, averages_moments=True),
)
HALF_RATE = tuple(setting.at_rate(0.5) for setting in FIRST)
ISLANDS_BY_RATE = tuple(setting.at_rate(factor) for factor in RATES for setting in (PLAIN, EVERY_16_STEPS))
SETTINGS = {setting.name: setting for setting in (*FIRST, *SECOND, *ISLANDS, *HALF_RATE, *ISLANDS_BY_RATE)}
GROUPS = {
    "rows": ROWS,
    "first": FIRST,
    "second": SECOND,
    "islands": ISLANDS,
    "half-rate": HALF_RATE,
    "islands-by-rate": ISLANDS_BY_RATE,
}


def plain_of(setting: Setting) -> Setting:
    """The setting that gaps of `setting` are measured against."""
    return next(other for other in SETTINGS.values() if other.is_plain and other.rate_factor == setting.rate_factor)
