"""Kernels of Gaussian codes against the reference, bit for bit, on values and payloads of all kinds, beside which nothing may be touched.

As a program: for a library, and for numbers of blocks per run; raises AssertionError at the first differing bit; a stray access ends the
process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from harness.guarded_rows import at_the_end_of_memory
from harness.kernel_bits import DTYPES, MARGIN_BYTES, SLICES, UNTOUCHED, kinds_of_values
from harness.per_block import equal_bits
from megatron_zpp.ops import gaussian_reference
from megatron_zpp.ops.payload import GAUSSIAN_BITS, GAUSSIAN_ROUNDS, gaussian_bytes

BLOCK = 256
KEYS = (0, 2**63 - 1, 5)
MEMBERS = (1, 2, 3, 5, 8)
SCALES = (1.0, -1.0, 0.0, -0.0, 2.0**-133, 2.0**-120, 2.0**127, -(2.0**127), float("inf"), -float("inf"), float("nan"))
Ops = ModuleType | Any


def kinds(dtype: torch.dtype, run_numel: int) -> Iterator[Tensor]:
    """Matrices [SLICES, run_numel]: kinds_of_values, few values that are not 0, equal ones, and any bits."""
    yield from kinds_of_values(dtype, run_numel)
    generator = torch.Generator().manual_seed(run_numel)
    sparse = torch.randn(SLICES, run_numel, generator=generator)
    sparse[:, torch.arange(run_numel) % 64 != 5] = 0
    yield sparse.to(dtype)
    yield torch.full((SLICES, run_numel), -1.5).to(dtype)
    yield torch.exp2(torch.randint(-40, 40, (SLICES, run_numel), generator=generator).float()).clamp(max=60000).to(dtype)
    some_bytes = torch.randint(0, 256, (SLICES, run_numel * dtype.itemsize), dtype=torch.uint8, generator=generator)
    yield some_bytes.view(dtype)
    yield torch.where(some_bytes.view(dtype).isfinite(), some_bytes.view(dtype), 1)


def encoded(ops: Ops, values: Tensor, bits: int, rounds: int, key: int) -> Tensor:
    row_bytes = gaussian_bytes(values.shape[1], bits)
    payloads = torch.full((values.shape[0], row_bytes + MARGIN_BYTES), UNTOUCHED, dtype=torch.uint8)
    ops.encode_gaussian(values, payloads, bits, rounds, key)
    return payloads


def decoded(
    ops: Ops, payloads: Tensor, run_numel: int, dtype: torch.dtype, bits: int, rounds: int, keys: list[int], accumulate: bool
) -> Tensor:
    values = torch.linspace(-1, 1, payloads.shape[0] * run_numel).view(-1, run_numel).to(dtype)
    ops.decode_gaussian(payloads, values, bits, rounds, keys, accumulate)
    return values


def mean(ops: Ops, payloads: Tensor, run_numel: int, bits: int, rounds: int, keys: list[int], accumulate: bool) -> Tensor:
    target = torch.linspace(-1, 1, payloads.shape[1] * run_numel).view(-1, run_numel).clone()
    ops.decode_mean_gaussian(payloads, target, bits, rounds, keys, accumulate)
    return target


def check_values(ops: Ops, blocks: int) -> int:
    """How many results were compared, of values that are encoded and come back."""
    run_numel, compared = blocks * BLOCK, 0
    for dtype, bits, rounds in product(DTYPES, GAUSSIAN_BITS, GAUSSIAN_ROUNDS):
        for number, values in enumerate(kinds(dtype, run_numel)):
            keys = [KEYS[(number + slice_) % len(KEYS)] for slice_ in range(SLICES)]
            arguments = (values, bits, rounds, keys[0])
            payloads = encoded(gaussian_reference, *arguments)
            assert equal_bits(encoded(ops, *arguments), payloads), (dtype, bits, rounds, number)
            output, accumulate = DTYPES[(number + blocks) % len(DTYPES)], number % 2 == 0
            some = (payloads, run_numel, output, bits, rounds, keys, accumulate)
            assert equal_bits(decoded(ops, *some), decoded(gaussian_reference, *some)), (dtype, bits, rounds, number, output, accumulate)
            compared += 2
    return compared


def any_payloads(members: int, bits: int, blocks: int) -> Tensor:
    """[members, SLICES, bytes]: any codes, under scales of all kinds; no encoder makes most of them."""
    generator = torch.Generator().manual_seed(members)
    payloads = torch.randint(0, 256, (members, SLICES, gaussian_bytes(blocks * BLOCK, bits)), dtype=torch.uint8, generator=generator)
    choice = torch.randint(0, len(SCALES), (members, SLICES, blocks), generator=generator)
    payloads[:, :, : 2 * blocks] = torch.tensor(SCALES, dtype=torch.bfloat16)[choice].contiguous().view(torch.uint8)
    return payloads


def check_any_payloads(ops: Ops, blocks: int) -> int:
    """How many results were compared, of payloads and of their means."""
    run_numel, compared = blocks * BLOCK, 0
    for bits, rounds, members in product(GAUSSIAN_BITS, GAUSSIAN_ROUNDS, MEMBERS):
        payloads, keys = any_payloads(members, bits, blocks), [key * 77 + 1 for key in range(members)]
        accumulate = members % 2 == 0
        some = (payloads, run_numel, bits, rounds, keys, accumulate)
        assert equal_bits(mean(ops, *some), mean(gaussian_reference, *some)), (bits, rounds, members)
        for dtype in DTYPES:
            rows = (payloads[0], run_numel, dtype, bits, rounds, list(KEYS), accumulate)
            assert equal_bits(decoded(ops, *rows), decoded(gaussian_reference, *rows)), (bits, rounds, dtype)
        compared += 1 + len(DTYPES)
    return compared


def check_rows(ops: Ops, blocks: int, first: int, gap: int) -> int:
    """How many results were compared, of rows that start `first` elements in, `gap` elements apart, and end where memory ends."""
    run_numel, compared = blocks * BLOCK, 0
    for dtype, bits in product(DTYPES, GAUSSIAN_BITS):
        rounds = 1 + bits % 2
        rows = torch.randn(SLICES, first + run_numel + gap, generator=torch.Generator().manual_seed(blocks)).to(dtype)
        flat = at_the_end_of_memory(rows.flatten()[: rows.numel() - gap].contiguous())
        runs = flat.as_strided((SLICES, run_numel), (rows.shape[1], 1), first)
        payloads = at_the_end_of_memory(torch.full((2, SLICES, gaussian_bytes(run_numel, bits)), UNTOUCHED, dtype=torch.uint8))
        expected = payloads.clone()
        for member in range(2):
            ops.encode_gaussian(runs, payloads[member], bits, rounds, member)
            gaussian_reference.encode_gaussian(runs, expected[member], bits, rounds, member)
        assert equal_bits(payloads, expected), (dtype, bits)
        before = flat.clone()
        some = (bits, rounds, list(KEYS), True)
        ops.decode_gaussian(payloads[1], runs, *some)
        gaussian_reference.decode_gaussian(expected[1], before.as_strided(runs.shape, runs.stride(), first), *some)
        assert equal_bits(flat, before), (dtype, bits)
        compared += 2
        if dtype == torch.float32:
            ops.decode_mean_gaussian(payloads, runs, bits, rounds, [0, 1], False)
            gaussian_reference.decode_mean_gaussian(
                expected, before.as_strided(runs.shape, runs.stride(), first), bits, rounds, [0, 1], False
            )
            assert equal_bits(flat, before), bits
            compared += 1
    return compared


def check_all(ops: Ops, blocks: int) -> int:
    rows = sum(check_rows(ops, blocks, first, gap) for first, gap in ((0, 0), (0, 8), (1, 0), (3, 2)))
    return check_values(ops, blocks) + check_any_payloads(ops, blocks) + rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.ops.load_library(sys.argv[1])
    print(sum(check_all(torch.ops.megatron_zpp, int(blocks)) for blocks in sys.argv[2:]))
