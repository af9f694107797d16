"""The definition of the quantization ops, in plain torch. The kernels of csrc/ equal it bit for bit; without kernels it runs.

One block of x, with Q = 127 (8 bits) or 7 (4 bits):

    scale = max|x| / Q          0 if that is 0 or underflows; NaN if a value of the block is not finite
    code  = rint(x / scale)     half to even, clamped to -Q..Q; 0 if the scale is 0 or NaN
    x'    = code * scale        rounded once more, to the requested dtype

Two options for gradients, both from SDP4Bit (arXiv 2410.15526):

rotated: every 32 neighbouring values x are encoded as H x, where H is the Hadamard matrix of +1 and -1. This spreads the error of an
outlier over its group. H x is not normalised, because the scales absorb the factor. As H H = 32 I, the mean of rotated payloads is
rotated once more and multiplied by 1/32.

noise_key: rounding is stochastic. The mean over keys of code * scale is x, so the errors of many ranks and steps cancel:

    code = rint(clamp(x / scale, -Q, Q) + w)        w = (2k + 1) / 2^17 - 1/2, with k one of 0 .. 65535, all equally likely

k is a function of the key and of the value's index in [slices, numel], row by row: one 32-bit hash serves two neighbours.

Results that are NaN have the bits 0x7fc00000 in fp32, 0x7fc0 in bf16 and 0x7e00 in fp16, because the NaNs of processors differ.
megatron_zpp.ops.quantization has checked the arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.ops.payload import SCALE_BYTES, padded_bytes

ROTATED_NUMEL = 32  # neighbouring values that a rotation mixes; blocks are multiples of it
NAN = float("nan")  # 0x7fc00000 in fp32
UINT32 = 2**32 - 1
UINT64 = 2**64 - 1


class Parts(NamedTuple):
    """Views of the two parts of payload rows [slices, bytes] that the ops read and write."""

    codes: Tensor  # [slices, numel * bits / 8] uint8
    scales: Tensor  # [slices, numel / block * 4] uint8, the bytes of fp32 values


def parts_of(payloads: Tensor, row_numel: int, bits: int, block_numel: int) -> Parts:
    """Codes and scales of rows `| codes, padded to 16 bytes | scales, padded to 16 bytes | bytes of the caller |`."""
    codes_bytes = row_numel * bits // 8
    scales_start = padded_bytes(codes_bytes)
    scales_bytes = row_numel // block_numel * SCALE_BYTES
    return Parts(payloads[:, :codes_bytes], payloads[:, scales_start : scales_start + scales_bytes])


def encode_blocks(
    values: Tensor, payloads: Tensor, bits: int, block_numel: int, rotated: bool = False, noise_key: int | None = None
) -> None:
    if values.numel() == 0:
        return
    slices, row_numel = values.shape
    parts = parts_of(payloads, row_numel, bits, block_numel)
    wide = _rotated(values.float()) if rotated else values.float()
    blocks = wide.reshape(slices, row_numel // block_numel, block_numel)
    largest_code = torch.full((), 2 ** (bits - 1) - 1, dtype=torch.float32, device=values.device)
    largest = blocks.abs().amax(-1)
    scales = _divided(largest, largest_code).masked_fill(~largest.isfinite(), NAN)
    quotients = _divided(blocks, scales.unsqueeze(-1)).clamp(-largest_code, largest_code)
    if noise_key is not None:
        quotients += noise(noise_key, torch.arange(values.numel() // 2, device=values.device)).view(quotients.shape)
    has_codes = (scales > 0).unsqueeze(-1)
    parts.codes.copy_(_packed(torch.where(has_codes, quotients.round(), 0).to(torch.int8).view(slices, row_numel), bits))
    parts.scales.copy_(scales.view(torch.uint8))


def decode_blocks(payloads: Tensor, values: Tensor, bits: int, block_numel: int) -> None:
    decoded = _decoded(payloads, values.shape[1], bits, block_numel)
    values.copy_(decoded)
    values.masked_fill_(decoded.isnan(), NAN)


def decode_mean_blocks(payloads: Tensor, mean: Tensor, bits: int, block_numel: int, accumulate: bool, rotated: bool = False) -> None:
    total = _decoded(payloads[0], mean.shape[1], bits, block_numel)
    for member in payloads[1:]:
        total += _decoded(member, mean.shape[1], bits, block_numel)
    total = _divided(total, torch.full((), payloads.shape[0], dtype=torch.float32, device=mean.device))
    if rotated:
        total = _rotated(total) * (1 / ROTATED_NUMEL)
    if accumulate:
        mean += total
    else:
        mean.copy_(total)
    mean.masked_fill_(mean.isnan(), NAN)


def recode_mean_blocks(
    payloads: Tensor, recoded: Tensor, row_numel: int, bits: int, next_bits: int, block_numel: int, noise_key: int | None = None
) -> None:
    mean = torch.empty(recoded.shape[0], row_numel, dtype=torch.float32, device=payloads.device)
    decode_mean_blocks(payloads, mean, bits, block_numel, accumulate=False)
    encode_blocks(mean, recoded, next_bits, block_numel, False, noise_key)


def mean_values(members: Tensor, mean: Tensor, accumulate: bool) -> None:
    """Writes the mean of members [members, slices, numel] to `mean` [slices, numel], or adds it. A NaN may have any NaN's bits here."""
    writes_at_once = mean.dtype == torch.float32 and not accumulate
    total = mean if writes_at_once else torch.empty(mean.shape, dtype=torch.float32, device=mean.device)
    total.copy_(members[0])
    for member in members[1:]:
        total.add_(member)
    total.div_(torch.full((), len(members), dtype=torch.float32, device=total.device))  # a tensor, as in _divided
    if accumulate:
        mean.add_(total)
    elif not writes_at_once:
        mean.copy_(total)


def noise(key: int, pairs: Tensor) -> Tensor:
    """The noise w of values 2 * pair and 2 * pair + 1 for each of `pairs` int64: fp32, odd multiples of 2^-17 between -1/2 and 1/2."""
    hashes = pair_hashes(key, pairs)
    k = torch.stack([hashes & 0xFFFF, hashes >> 16], dim=-1).flatten()
    return (2 * k + 1).float() * 2.0**-17 - 0.5


def pair_hashes(key: int, pairs: Tensor) -> Tensor:
    """32-bit hashes, as int64. The low half decides the noise of the even value of a pair, the high half that of the odd value."""
    first, second = key_words(key)
    return hashed((pairs + first) & UINT32, ((pairs >> 32) + second) & UINT32)


def key_words(key: int) -> tuple[int, int]:
    """The low and the high half of the mixed key, so that neighbouring keys start far apart."""
    mixed = splitmix64(key)
    return mixed & UINT32, mixed >> 32


def splitmix64(state: int) -> int:
    """SplitMix64 of the state (Steele, Lea, Flood, OOPSLA 2014): 64 bits, a bijection; each depends on all bits of the state."""
    mixed = (state + 0x9E3779B97F4A7C15) & UINT64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & UINT64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & UINT64
    return mixed ^ mixed >> 31


def hashed(counters: Tensor, words: Tensor) -> Tensor:
    """32-bit hashes, as int64: triple32 of C. Wellons' hash-prospector, with a second word mixed in after its first round."""
    x = counters ^ counters >> 17
    x = (x * 0xED5AD4BB) & UINT32
    x = x ^ x >> 11 ^ words
    x = (x * 0xAC4C1B51) & UINT32
    x = x ^ x >> 15
    x = (x * 0x31848BAB) & UINT32
    return x ^ x >> 14


def _rotated(values: Tensor) -> Tensor:
    """Multiplies every 32 neighbours of fp32 values [slices, numel] by the Hadamard matrix, in five stages of sums and differences."""
    for distance in (1, 2, 4, 8, 16):
        low, high = values.reshape(-1, 2, distance).unbind(1)
        values = torch.stack([low + high, low - high], dim=1).view(values.shape)
    return values


def _divided(dividend: Tensor, divisor: Tensor) -> Tensor:
    # Divisors are tensors on the same device: to divide by a Python number, torch on CUDA multiplies by its rounded inverse.
    return torch.div(dividend, divisor)


def _decoded(payloads: Tensor, row_numel: int, bits: int, block_numel: int) -> Tensor:
    slices = payloads.shape[0]
    if slices == 0 or row_numel == 0:
        return torch.empty(slices, row_numel, device=payloads.device)
    parts = parts_of(payloads, row_numel, bits, block_numel)
    # Cloned, because rows may be any number of bytes apart, and a view as fp32 needs a multiple of 4.
    scales = parts.scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    codes = _unpacked(parts.codes, bits).float().view(slices, row_numel // block_numel, block_numel)
    return (codes * scales.unsqueeze(-1)).view(slices, row_numel)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """The bytes, uint8 [slices, numel * bits / 8], of codes [slices, numel] int8."""
    if bits == 8:
        return codes.view(torch.uint8)
    low, high = codes[:, 0::2].view(torch.uint8), codes[:, 1::2].view(torch.uint8)
    return (low & 0xF) | (high << 4)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The codes, int8 [slices, numel], in bytes [slices, numel * bits / 8] uint8."""
    if bits == 8:
        return packed.view(torch.int8)
    # Shifts of int8 keep the sign.
    low, high = packed.view(torch.int8) << 4 >> 4, packed.view(torch.int8) >> 4
    return torch.stack([low, high], dim=-1).flatten(-2)
