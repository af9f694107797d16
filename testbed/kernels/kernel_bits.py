"""Kernels against the reference, bit for bit, on values of all kinds. As a program: for a library, and for sizes as block_numel:blocks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from itertools import product

import torch
from torch import Tensor

from megatron_zpp.ops.payload import coded_bytes
from megatron_zpp.ops.reference import noise
from testbed.kernels.bit_differences import Comparison, Ops, run_as_program

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (4, 8)
SLICES = 3
MARGIN_BYTES = 48  # behind codes and scales, where exact values would be
UNTOUCHED = 0xA5
KINDS_WITH_OPTIONS = (0, 2, 3, 7, 9, 12, 15)  # ordinary, two subnormal, one whose sums overflow, with ties, with NaN, with infinity


def kinds_of_values(dtype: torch.dtype, row_numel: int) -> Iterator[Tensor]:
    """Matrices [SLICES, row_numel]: ordinary, tiny, subnormal, huge, with zeros, with ties, with values that are not finite."""
    normal = torch.randn(SLICES, row_numel, generator=torch.Generator().manual_seed(row_numel))
    largest = torch.finfo(dtype).max
    for scale in (1.0, 2.0**-20, 2.0**-126, 2.0**-140, 2.0**-149, 2.0**90, largest / 8):
        yield (normal * scale).clamp(-largest, largest).to(dtype)
    yield torch.full_like(normal, largest).to(dtype) * normal.sign().to(dtype)
    yield torch.full_like(normal, -0.0).to(dtype)
    yield torch.round(normal * 4).to(dtype) * 0.5
    alone = torch.zeros_like(normal)
    alone[:, row_numel - 1] = -3.0
    yield alone.to(dtype)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for position in (0, row_numel // 2 + 1, row_numel - 1):
            spoilt = normal.clone()
            spoilt[1, position] = bad
            yield spoilt.to(dtype)


def next_to_ties(dtype: torch.dtype, row_numel: int, bits: int, noise_key: int | None) -> Tensor:
    """[SLICES, row_numel] whose quotients, noise included, lie within two steps of their format beside k + 1/2, for blocks of any size."""
    count, limit = SLICES * row_numel, 2 ** (bits - 1) - 1
    largest = torch.tensor(math.pi, dtype=dtype)
    generator = torch.Generator().manual_seed(row_numel)
    drawn = torch.zeros(count) if noise_key is None else noise(noise_key, torch.arange(count // 2))
    ties = torch.randint(-limit, limit, (count,), generator=generator) + 0.5
    values = ((ties.double() - drawn) * (largest.float() / limit)).to(dtype)
    as_integers = torch.int32 if dtype == torch.float32 else torch.int16
    steps = torch.randint(-2, 3, (count,), generator=generator, dtype=as_integers)
    values = torch.where(values == 0, values, (values.view(as_integers) + steps).view(dtype)).clamp(-largest, largest)
    values[::32] = largest
    return values.view(SLICES, row_numel)


def encoded(ops: Ops, values: Tensor, bits: int, block_numel: int, rotated: bool = False, noise_key: int | None = None) -> Tensor:
    row_bytes = coded_bytes(values.shape[1], bits, block_numel)
    payloads = torch.full((values.shape[0], row_bytes + MARGIN_BYTES), UNTOUCHED, dtype=torch.uint8, device=values.device)
    ops.encode_blocks(values, payloads, bits, block_numel, rotated, noise_key)
    return payloads


def decoded(ops: Ops, payloads: Tensor, row_numel: int, dtype: torch.dtype, bits: int, block_numel: int) -> Tensor:
    values = torch.full((payloads.shape[0], row_numel), 7.0, dtype=dtype, device=payloads.device)
    ops.decode_blocks(payloads, values, bits, block_numel)
    return values


def mean(ops: Ops, payloads: Tensor, row_numel: int, bits: int, block_numel: int, accumulate: bool, rotated: bool = False) -> Tensor:
    target = torch.linspace(-1, 1, payloads.shape[1] * row_numel).view(-1, row_numel).to(payloads.device)
    ops.decode_mean_blocks(payloads, target, bits, block_numel, accumulate, rotated)
    return target


def recoded(
    ops: Ops, payloads: Tensor, row_numel: int, bits: int, next_bits: int, block_numel: int, noise_key: int | None = None
) -> Tensor:
    row_bytes = coded_bytes(row_numel, next_bits, block_numel)
    target = torch.full((payloads.shape[1], row_bytes + MARGIN_BYTES), UNTOUCHED, dtype=torch.uint8, device=payloads.device)
    ops.recode_mean_blocks(payloads, target, row_numel, bits, next_bits, block_numel, noise_key)
    return target


def check_all(comparison: Comparison, block_numel: int, blocks: int) -> None:
    """Compares the kernels of codes on values of all kinds, without options.

    Kinds with each dtype and number of bits; and with these, in turn, each dtype of what is decoded and each number of members.
    """
    row_numel, same = block_numel * blocks, comparison.same
    for turn, (dtype, bits) in enumerate(product(DTYPES, BITS)):
        kinds = [
            same("encode_blocks", encoded, values, bits, block_numel, about=f"kind {kind}")
            for kind, values in enumerate(kinds_of_values(dtype, row_numel))
        ]
        for kind, payloads in enumerate(kinds):
            output = DTYPES[(kind + turn // 2) % len(DTYPES)]
            same("decode_blocks", decoded, payloads, row_numel, output, bits, block_numel, about=f"kind {kind} of {dtype}")
        received = torch.stack(kinds)
        for first in range(0, len(kinds), 4):
            members = 1 + (first // 4 + turn // 2) % 4
            some, about = received[first : first + members], f"kinds from {first} of {dtype}"
            for accumulate, next_bits in zip((False, True), BITS, strict=True):
                same("decode_mean_blocks", mean, some, row_numel, bits, block_numel, accumulate, about=about)
                same("recode_mean_blocks", recoded, some, row_numel, bits, next_bits, block_numel, about=about)


def check_options(comparison: Comparison, block_numel: int, blocks: int) -> None:
    """check_all for rotated values and stochastic rounding, on some kinds of values."""
    row_numel, same = block_numel * blocks, comparison.same
    for dtype, bits in product(DTYPES, BITS):
        every_kind = list(kinds_of_values(dtype, row_numel))
        for rotated, noise_key in ((True, None), (False, 0), (True, 2**63 - 1)):
            kinds = [
                same("encode_blocks", encoded, every_kind[kind], bits, block_numel, rotated, noise_key, about=f"kind {kind}")
                for kind in KINDS_WITH_OPTIONS
            ]
        received = torch.stack(kinds)
        for first, members in ((0, 1), (1, 3)):
            some, about = received[first : first + members], f"kinds from {KINDS_WITH_OPTIONS[first]} of {dtype}"
            for accumulate, next_bits in zip((False, True), BITS, strict=True):
                same("decode_mean_blocks", mean, some, row_numel, bits, block_numel, accumulate, True, about=about)
                same("recode_mean_blocks", recoded, some, row_numel, bits, next_bits, block_numel, members, about=about)


def check_ties(comparison: Comparison, block_numel: int, blocks: int) -> None:
    """Compares codes where a quotient that is off by its last bit has another one."""
    for dtype, bits, noise_key in product(DTYPES, BITS, (None, 3)):
        values = next_to_ties(dtype, block_numel * blocks, bits, noise_key)
        comparison.same("encode_blocks", encoded, values, bits, block_numel, False, noise_key, about="next to ties")


def check_sizes(comparison: Comparison, sizes: Iterable[str]) -> None:
    """All three, for sizes as on the command line."""
    for size in sizes:
        block_numel, blocks = map(int, size.split(":"))
        check_all(comparison, block_numel, blocks)
        check_options(comparison, block_numel, blocks)
        check_ties(comparison, block_numel, blocks)


if __name__ == "__main__":
    run_as_program(lambda comparison: check_sizes(comparison, sys.argv[2:]))
