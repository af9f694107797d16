"""Kernels against the reference, bit for bit, on values of all kinds. As a program: for a library, and for sizes as block_numel:blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from harness.per_block import equal_bits
from megatron_zpp.ops import reference
from megatron_zpp.ops.payload import coded_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (4, 8)
SLICES = 3
MARGIN_BYTES = 48  # behind codes and scales, where an exact run would be
UNTOUCHED = 0xA5
KINDS_WITH_OPTIONS = (0, 2, 3, 7, 9, 12, 15)  # ordinary, two subnormal, one whose sums overflow, with ties, with NaN, with infinity
Ops = ModuleType | Any


def kinds_of_values(dtype: torch.dtype, run_numel: int) -> Iterator[Tensor]:
    """Matrices [SLICES, run_numel]: ordinary, tiny, subnormal, huge, with zeros, with ties, with values that are not finite."""
    normal = torch.randn(SLICES, run_numel, generator=torch.Generator().manual_seed(run_numel))
    largest = torch.finfo(dtype).max
    for scale in (1.0, 2.0**-20, 2.0**-126, 2.0**-140, 2.0**-149, 2.0**90, largest / 8):
        yield (normal * scale).clamp(-largest, largest).to(dtype)
    yield torch.full_like(normal, largest).to(dtype) * normal.sign().to(dtype)
    yield torch.full_like(normal, -0.0).to(dtype)
    yield torch.round(normal * 4).to(dtype) * 0.5
    alone = torch.zeros_like(normal)
    alone[:, run_numel - 1] = -3.0
    yield alone.to(dtype)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for position in (0, run_numel // 2 + 1, run_numel - 1):
            spoilt = normal.clone()
            spoilt[1, position] = bad
            yield spoilt.to(dtype)


def encoded(ops: Ops, values: Tensor, bits: int, block_numel: int, rotated: bool = False, noise_key: int | None = None) -> Tensor:
    row_bytes = coded_bytes(values.shape[1], bits, block_numel)
    payloads = torch.full((values.shape[0], row_bytes + MARGIN_BYTES), UNTOUCHED, dtype=torch.uint8)
    ops.encode_blocks(values, payloads, bits, block_numel, rotated, noise_key)
    return payloads


def decoded(ops: Ops, payloads: Tensor, run_numel: int, dtype: torch.dtype, bits: int, block_numel: int) -> Tensor:
    values = torch.full((payloads.shape[0], run_numel), 7.0, dtype=dtype)
    ops.decode_blocks(payloads, values, bits, block_numel)
    return values


def mean(ops: Ops, payloads: Tensor, run_numel: int, bits: int, block_numel: int, accumulate: bool, rotated: bool = False) -> Tensor:
    target = torch.linspace(-1, 1, payloads.shape[1] * run_numel).view(-1, run_numel).clone()
    ops.decode_mean_blocks(payloads, target, bits, block_numel, accumulate, rotated)
    return target


def recoded(
    ops: Ops, payloads: Tensor, run_numel: int, bits: int, next_bits: int, block_numel: int, noise_key: int | None = None
) -> Tensor:
    target = torch.full((payloads.shape[1], coded_bytes(run_numel, next_bits, block_numel) + MARGIN_BYTES), UNTOUCHED, dtype=torch.uint8)
    ops.recode_mean_blocks(payloads, target, run_numel, bits, next_bits, block_numel, noise_key)
    return target


class Comparison:
    """Counts the results of kernels that were compared with the reference's; AssertionError at the first differing bit."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.compared = 0

    def same(self, make: Callable[..., Tensor], *arguments: object) -> Tensor:
        expected = make(reference, *arguments)
        assert equal_bits(make(self._ops, *arguments), expected), (make.__name__, arguments)
        self.compared += 1
        return expected


def check_all(ops: Ops, block_numel: int, blocks: int) -> int:
    """Raises AssertionError at the first differing bit; returns how many results were compared. Without options."""
    run_numel, comparison = block_numel * blocks, Comparison(ops)
    same = comparison.same
    for dtype, bits in product(DTYPES, BITS):
        kinds = [same(encoded, values, bits, block_numel) for values in kinds_of_values(dtype, run_numel)]
        for payloads, output in product(kinds, DTYPES):
            same(decoded, payloads, run_numel, output, bits, block_numel)
        received = torch.stack(kinds)
        for first, members in product(range(0, len(kinds), 4), (1, 2, 3, 4)):
            some = received[first : first + members]
            same(mean, some, run_numel, bits, block_numel, False)
            same(mean, some, run_numel, bits, block_numel, True)
            for next_bits in BITS:
                same(recoded, some, run_numel, bits, next_bits, block_numel)
    return comparison.compared


def check_options(ops: Ops, block_numel: int, blocks: int) -> int:
    """check_all for rotated values and stochastic rounding, on some kinds of values."""
    run_numel, comparison = block_numel * blocks, Comparison(ops)
    same = comparison.same
    for dtype, bits in product(DTYPES, BITS):
        for rotated, noise_key in ((True, None), (False, 0), (True, 2**63 - 1)):
            every_kind = list(kinds_of_values(dtype, run_numel))
            kinds = [same(encoded, every_kind[kind], bits, block_numel, rotated, noise_key) for kind in KINDS_WITH_OPTIONS]
        received = torch.stack(kinds)
        for first, members in ((0, 1), (1, 3)):
            some = received[first : first + members]
            for accumulate, next_bits in zip((False, True), BITS, strict=True):
                same(mean, some, run_numel, bits, block_numel, accumulate, True)
                same(recoded, some, run_numel, bits, next_bits, block_numel, members)
    return comparison.compared


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.ops.load_library(sys.argv[1])
    sizes = [[int(number) for number in size.split(":")] for size in sys.argv[2:]]
    print(sum(check(torch.ops.megatron_zpp, *size) for size in sizes for check in (check_all, check_options)))
