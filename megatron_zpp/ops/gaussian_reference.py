"""The definition of the Gaussian codes, in plain torch. The kernels of csrc/gaussian/ equal it bit for bit; without kernels it runs.

A block of 256 values is rotated at random, which makes its values nearly Gaussian, and each becomes one of the levels that have the least
error for a Gaussian (Lloyd, Max), times the block's root mean square. The scale leaves no bias (EDEN, Vargaftik et al. 2022).

    p = the power of two that brings max|x| to 1 <= max|x| p < 2, within 2^-126 to 2^126, so that squares neither overflow nor vanish
    u = H(s x p), and with two rounds H(t H(s x p))     H: the Hadamard matrix of +1 and -1; s, t: 256 random signs each
    variance = sum u^2 / 256
    magnitude = how many thresholds^2 * variance are below u^2      level = levels[magnitude] with the sign of u
    S = bf16(sum u^2 / sum(u level) / 16^rounds / p)
    x' = s H(level S / 16^rounds), and with two rounds s H(t H(level S / 16^rounds)); rounded once more, to the requested dtype

All in fp32, no two operations contracted to one. Squares are compared, because libraries differ in the last bit of a square root. H is
applied in eight stages of sums and differences, of values at distances 1, 2, 4, ... 128. A sum over a block adds its upper half to its
lower half, eight times over. S is NaN if a value of the block is not finite, or if S overflows; S is 0 if all values are 0 or it
underflows. In both cases the codes are 0. A block with an S that is not finite decodes to NaN as a whole.

The signs are a function of the key alone, and the same for every block of a call. Sign i of s is bit i % 32 of hash i / 32 of the noise of
stochastic rounding (`reference.pair_hashes`), and those of t come from the next 8 hashes; 1 is minus.

A payload row: | S bf16, padded to 16 bytes | codes | bytes of the caller |. The codes of a block are bit planes of 32 bytes: first the
signs of the levels, then the magnitudes' bits, the lowest first. Bit i % 8 of byte i / 8 of a plane belongs to value i.

Results that are NaN have the bits 0x7fc00000 in fp32, 0x7fc0 in bf16 and 0x7e00 in fp16, because the NaNs of processors differ.
megatron_zpp.ops.gaussian has checked the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.ops.payload import GAUSSIAN_BLOCK_NUMEL, GAUSSIAN_SCALE_BYTES, padded_bytes
from megatron_zpp.ops.reference import NAN, pair_hashes

# By bits: the levels of a Gaussian of variance 1 with the least mean square error, and the thresholds between them.
LEVELS = {
    1: (0.79788,),
    2: (0.45278, 1.51042),
    3: (0.24509, 0.75601, 1.34391, 2.15195),
    4: (0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259),
}
THRESHOLDS = {
    1: (),
    2: (0.98160,),
    3: (0.50055, 1.04996, 1.74793),
    4: (0.25822, 0.52240, 0.79955, 1.09929, 1.43714, 1.84353, 2.40080),
}
NUMEL = GAUSSIAN_BLOCK_NUMEL
PLANE_BYTES = NUMEL // 8
SIGNS_PER_HASH = 32
INFINITY_BITS = 0x7F800000
EXPONENT_BIAS = 127
LARGEST_EXPONENT = 126  # of max|x|: with it, p and 1 / p are normal numbers
SCALE_PER_ROUND = 1 / 16  # H H = 256; half of it when values are encoded, half when they are decoded


class Parts(NamedTuple):
    """Views of the two parts of payload rows [slices, bytes] that the ops read and write."""

    scales: Tensor  # [slices, blocks * 2] uint8, the bytes of bf16 values
    planes: Tensor  # [slices, blocks * bits * 32] uint8


def parts_of(payloads: Tensor, row_numel: int, bits: int) -> Parts:
    scales_bytes = row_numel // NUMEL * GAUSSIAN_SCALE_BYTES
    planes_start = padded_bytes(scales_bytes)
    return Parts(payloads[:, :scales_bytes], payloads[:, planes_start : planes_start + row_numel // 8 * bits])


def encode_gaussian(values: Tensor, payloads: Tensor, bits: int, rounds: int, key: int) -> None:
    if values.numel() == 0:
        return
    slices, row_numel = values.shape
    parts = parts_of(payloads, row_numel, bits)
    blocks = values.float().reshape(-1, NUMEL)
    largest = blocks.abs().view(torch.int32).amax(-1, keepdim=True)
    is_finite = largest < INFINITY_BITS
    exponents = ((largest >> 23) - EXPONENT_BIAS).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    rotated = blocks.masked_fill(~is_finite, 0) * _power_of_two(-exponents)
    for signs in random_signs(key, rounds, values.device):
        rotated = hadamard(rotated * signs)
    magnitudes, levels, square = _quantized(rotated, bits)
    ratios = torch.div(square, _sum(rotated.abs() * levels)) * SCALE_PER_ROUND**rounds
    scales = (ratios * _power_of_two(exponents)).masked_fill(largest == 0, 0).bfloat16()
    scales.masked_fill_(~(is_finite & scales.isfinite()), NAN)
    has_codes = scales > 0
    planes = _planes((magnitudes << 1 | rotated.signbit()) * has_codes, bits)
    parts.scales.copy_(scales.view(torch.uint8).view(slices, -1))
    parts.planes.copy_(planes.view(slices, -1))


def decode_gaussian(payloads: Tensor, values: Tensor, bits: int, rounds: int, keys: Sequence[int], accumulate: bool) -> None:
    decoded = torch.empty(values.shape, device=values.device)
    for row, payload, key in zip(decoded, payloads, keys, strict=True):
        row.copy_(_decoded(payload.unsqueeze(0), values.shape[1], bits, rounds, key)[0])
    if accumulate:
        decoded += values
    values.copy_(decoded)
    values.masked_fill_(decoded.isnan(), NAN)


def decode_mean_gaussian(payloads: Tensor, mean: Tensor, bits: int, rounds: int, keys: Sequence[int], accumulate: bool) -> None:
    total = _decoded(payloads[0], mean.shape[1], bits, rounds, keys[0])
    for member, key in zip(payloads[1:], keys[1:], strict=True):
        total += _decoded(member, mean.shape[1], bits, rounds, key)
    # The divisor is a tensor: if it were a number, torch would multiply by its rounded inverse on CUDA.
    total = torch.div(total, torch.full((), payloads.shape[0], dtype=torch.float32, device=mean.device))
    if accumulate:
        mean += total
    else:
        mean.copy_(total)
    mean.masked_fill_(mean.isnan(), NAN)


def random_signs(key: int, rounds: int, device: torch.device | None = None) -> Tensor:
    """The signs of every round, fp32 [rounds, 256]: +1 and -1."""
    hashes = pair_hashes(key, torch.arange(rounds * NUMEL // SIGNS_PER_HASH, device=device))
    bits = hashes.unsqueeze(-1) >> torch.arange(SIGNS_PER_HASH, device=device) & 1
    return (1 - 2 * bits).view(rounds, NUMEL).float()


def hadamard(blocks: Tensor) -> Tensor:
    """H times each row of fp32 `blocks` [blocks, 256]."""
    for stage in range(8):
        low, high = blocks.reshape(-1, 2, 1 << stage).unbind(1)
        blocks = torch.stack([low + high, low - high], dim=1).view(-1, NUMEL)
    return blocks


def _quantized(rotated: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Magnitudes [blocks, 256] int32, their levels [blocks, 256], and the sums of squares [blocks, 1]."""
    squares = rotated * rotated
    square = _sum(squares)
    squared = torch.tensor([threshold * threshold for threshold in THRESHOLDS[bits]], dtype=torch.float32, device=rotated.device)
    thresholds = squared * (square * (1 / NUMEL))
    magnitudes = (squares.unsqueeze(1) > thresholds.unsqueeze(-1)).sum(1, dtype=torch.int32)
    return magnitudes, _levels(bits, rotated.device)[magnitudes], square


def _levels(bits: int, device: torch.device) -> Tensor:
    return torch.tensor(LEVELS[bits], dtype=torch.float32, device=device)


def _sum(blocks: Tensor) -> Tensor:
    """The sums [blocks, 1] of [blocks, 256]: halves are added to halves, because the order of a sum decides its bits."""
    while blocks.shape[1] > 1:
        low, high = blocks.tensor_split(2, dim=1)
        blocks = low + high
    return blocks


def _power_of_two(exponents: Tensor) -> Tensor:
    """2 to the power of int32 exponents from -126 to 127, fp32."""
    return (exponents + EXPONENT_BIAS << 23).view(torch.float32)


def _planes(codes: Tensor, bits: int) -> Tensor:
    """The bit planes, uint8 [blocks, bits, 32], of codes [blocks, 256] int32: the sign in the lowest bit, then the magnitude."""
    places = torch.arange(bits, device=codes.device).view(1, bits, 1, 1)
    digits = codes.view(-1, 1, PLANE_BYTES, 8) >> places & 1
    return (digits << torch.arange(8, device=codes.device)).sum(-1).to(torch.uint8)


def _codes(planes: Tensor) -> Tensor:
    """The codes, int64 [blocks, 256], of bit planes [blocks, bits, 32] uint8."""
    bits = planes.shape[1]
    digits = planes.unsqueeze(-1).long() >> torch.arange(8, device=planes.device) & 1
    return (digits << torch.arange(bits, device=planes.device).view(1, bits, 1, 1)).sum(1).view(-1, NUMEL)


def _decoded(payloads: Tensor, row_numel: int, bits: int, rounds: int, key: int) -> Tensor:
    """The values, fp32 [slices, numel], of payloads [slices, bytes] from one sender."""
    slices = payloads.shape[0]
    if slices == 0 or row_numel == 0:
        return torch.empty(slices, row_numel, device=payloads.device)
    parts = parts_of(payloads, row_numel, bits)
    # Cloned, because rows may be any number of bytes apart, and a view as bf16 needs a multiple of 2.
    scales = parts.scales.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float().view(-1, 1)
    codes = _codes(parts.planes.reshape(-1, bits, PLANE_BYTES))
    products = _levels(bits, payloads.device)[codes >> 1] * (scales * SCALE_PER_ROUND**rounds)
    rotated = torch.where(codes & 1 != 0, -products, products)
    for signs in random_signs(key, rounds, payloads.device).flip(0):
        rotated = hadamard(rotated) * signs
    return rotated.masked_fill(~scales.isfinite(), NAN).view(slices, row_numel)
