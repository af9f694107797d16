"""Kernels of Gaussian codes against the reference, bit for bit, on values and payloads of all kinds, beside which nothing may be touched.

As a program: for a library, and for numbers of blocks per run, such as 5, or rows:33 for fewer checks. A stray access ends the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import product

import torch
from torch import Tensor

from megatron_zpp.ops.payload import GAUSSIAN_BITS, GAUSSIAN_ROUNDS, gaussian_bytes
from testbed.kernels.bit_differences import Comparison, Ops, run_as_program
from testbed.kernels.guarded_rows import at_the_end_of_memory, placed_at_the_end, with_last_gap
from testbed.kernels.kernel_bits import DTYPES, MARGIN_BYTES, SLICES, UNTOUCHED, kinds_of_values

BLOCK = 256
KEYS = (0, 2**63 - 1, 5)
MEMBERS = (1, 2, 3, 5, 8)
MANY = 600  # senders, for three launches on a GPU
SCALES = (1.0, -1.0, 0.0, -0.0, 2.0**-133, 2.0**-120, 2.0**127, -(2.0**127), float("inf"), -float("inf"), float("nan"))
MODEST_SCALES = (1.0, -1.0, 0.0, -0.0, 2.0**-120, 0.37)


def kinds(dtype: torch.dtype, row_numel: int) -> Iterator[Tensor]:
    """Matrices [SLICES, row_numel]: kinds_of_values, few values that are not 0, equal ones, and any bits."""
    yield from kinds_of_values(dtype, row_numel)
    generator = torch.Generator().manual_seed(row_numel)
    sparse = torch.randn(SLICES, row_numel, generator=generator)
    sparse[:, torch.arange(row_numel) % 64 != 5] = 0
    yield sparse.to(dtype)
    yield torch.full((SLICES, row_numel), -1.5).to(dtype)
    yield torch.exp2(torch.randint(-40, 40, (SLICES, row_numel), generator=generator).float()).clamp(max=60000).to(dtype)
    some_bytes = torch.randint(0, 256, (SLICES, row_numel * dtype.itemsize), dtype=torch.uint8, generator=generator)
    yield some_bytes.view(dtype)
    yield torch.where(some_bytes.view(dtype).isfinite(), some_bytes.view(dtype), 1)


def encoded(ops: Ops, values: Tensor, bits: int, rounds: int, key: int) -> Tensor:
    row_bytes = gaussian_bytes(values.shape[1], bits)
    payloads = torch.full((values.shape[0], row_bytes + MARGIN_BYTES), UNTOUCHED, dtype=torch.uint8, device=values.device)
    ops.encode_gaussian(values, payloads, bits, rounds, key)
    return payloads


def decoded(
    ops: Ops, payloads: Tensor, row_numel: int, dtype: torch.dtype, bits: int, rounds: int, keys: list[int], accumulate: bool
) -> Tensor:
    values = torch.linspace(-1, 1, payloads.shape[0] * row_numel).view(-1, row_numel).to(payloads.device, dtype)
    ops.decode_gaussian(payloads, values, bits, rounds, keys, accumulate)
    return values


def mean(ops: Ops, payloads: Tensor, row_numel: int, bits: int, rounds: int, keys: list[int], accumulate: bool, gap: int = 0) -> Tensor:
    """The means, `gap` elements apart, and what is between them."""
    slices, stride = payloads.shape[1], row_numel + gap
    target = torch.linspace(-1, 1, slices * stride).view(slices, stride).to(payloads.device)
    ops.decode_mean_gaussian(payloads, target[:, :row_numel], bits, rounds, keys, accumulate)
    return target


def encoded_rows(ops: Ops, values: Tensor, first: int, gap: int, bits: int, rounds: int, keys: list[int]) -> Tensor:
    """A payload of each key. Rows and payloads end where memory ends."""
    _, runs = placed_at_the_end(values, first, gap)
    payloads = torch.full((len(keys), len(values), gaussian_bytes(values.shape[1], bits)), UNTOUCHED, dtype=torch.uint8)
    payloads = at_the_end_of_memory(payloads)
    for key, member in zip(keys, payloads, strict=True):
        ops.encode_gaussian(runs, member, bits, rounds, key)
    return payloads


def decoded_rows(ops: Ops, payloads: Tensor, values: Tensor, first: int, gap: int, bits: int, rounds: int, keys: list[int]) -> Tensor:
    """Values to which what the payloads decode to is added."""
    flat, runs = placed_at_the_end(values, first, gap)
    ops.decode_gaussian(at_the_end_of_memory(payloads), runs, bits, rounds, keys, True)
    return with_last_gap(flat, len(values), gap)


def mean_rows(ops: Ops, payloads: Tensor, values: Tensor, first: int, gap: int, bits: int, rounds: int, keys: list[int]) -> Tensor:
    flat, runs = placed_at_the_end(torch.zeros_like(values), first, gap)
    ops.decode_mean_gaussian(at_the_end_of_memory(payloads), runs, bits, rounds, keys, False)
    return with_last_gap(flat, len(values), gap)


def check_values(comparison: Comparison, blocks: int) -> None:
    """Compares values that are encoded and come back."""
    same, row_numel = comparison.same, blocks * BLOCK
    for dtype, bits, rounds in product(DTYPES, GAUSSIAN_BITS, GAUSSIAN_ROUNDS):
        # A third of the kinds with each: every kind with every dtype, with two or three of the eight pairs of bits and rounds.
        for number, values in list(enumerate(kinds(dtype, row_numel)))[(bits + rounds) % 3 :: 3]:
            keys = [KEYS[(number + slice_) % len(KEYS)] for slice_ in range(SLICES)]
            payloads = same("encode_gaussian", encoded, values, bits, rounds, keys[0], about=f"kind {number}")
            output, accumulate = DTYPES[(number + blocks) % len(DTYPES)], (number + bits) % 2 == 0
            given = (payloads, row_numel, output, bits, rounds, keys, accumulate)
            same("decode_gaussian", decoded, *given, about=f"kind {number} of {dtype}")


def any_payloads(members: int, bits: int, blocks: int, scales: tuple[float, ...] = SCALES) -> Tensor:
    """[members, SLICES, bytes]: any codes, under any of these scales; no encoder makes most of them."""
    generator = torch.Generator().manual_seed(members)
    payloads = torch.randint(0, 256, (members, SLICES, gaussian_bytes(blocks * BLOCK, bits)), dtype=torch.uint8, generator=generator)
    choice = torch.randint(0, len(scales), (members, SLICES, blocks), generator=generator)
    payloads[:, :, : 2 * blocks] = torch.tensor(scales, dtype=torch.bfloat16)[choice].contiguous().view(torch.uint8)
    return payloads


def check_any_payloads(comparison: Comparison, blocks: int) -> None:
    """Compares what payloads decode to, and their means."""
    same, row_numel = comparison.same, blocks * BLOCK
    for bits, rounds, members in product(GAUSSIAN_BITS, GAUSSIAN_ROUNDS, MEMBERS):
        payloads, keys = any_payloads(members, bits, blocks), [key * 77 + 1 for key in range(members)]
        accumulate = members % 2 == 0
        same("decode_mean_gaussian", mean, payloads, row_numel, bits, rounds, keys, accumulate, about="any bytes")
        given = (payloads[0], row_numel, DTYPES[members % 3], bits, rounds, list(KEYS), accumulate)
        same("decode_gaussian", decoded, *given, about="any bytes")


def check_many_senders(comparison: Comparison) -> None:
    """Compares messages of more senders than one launch decodes. No mean is NaN, which would hide what is left out of it."""
    keys = [key * 77 + 1 for key in range(MANY)]
    for bits, accumulate in ((2, False), (3, True)):
        payloads = any_payloads(MANY, bits, 1, MODEST_SCALES)
        found = comparison.same("decode_mean_gaussian", mean, payloads, BLOCK, bits, 1, keys, accumulate, 8, about=f"{MANY} members")
        assert found.isfinite().all()
        given = (payloads[:, 0], BLOCK, DTYPES[bits % 3], bits, 1, keys, accumulate)
        comparison.same("decode_gaussian", decoded, *given, about=f"{MANY} slices")


def check_rows(comparison: Comparison, blocks: int, first: int, gap: int) -> None:
    """Compares rows that start `first` elements in, `gap` elements apart, and end where memory ends."""
    same = comparison.same
    for dtype, bits in product(DTYPES, GAUSSIAN_BITS):
        values = torch.randn(SLICES, blocks * BLOCK, generator=torch.Generator().manual_seed(blocks)).to(dtype)
        at_place = (values, first, gap, bits, 1 + bits % 2)
        payloads = same("encode_gaussian", encoded_rows, *at_place, [0, 1])
        same("decode_gaussian", decoded_rows, payloads[1], *at_place, list(KEYS))
        if dtype == torch.float32:
            same("decode_mean_gaussian", mean_rows, payloads, *at_place, [0, 1])


def check_all_rows(comparison: Comparison, blocks: int) -> None:
    for first, gap in ((0, 0), (0, 8), (1, 0), (3, 2)):
        check_rows(comparison, blocks, first, gap)


def check_all(comparison: Comparison, blocks: int) -> None:
    check_values(comparison, blocks)
    check_any_payloads(comparison, blocks)
    check_many_senders(comparison)
    check_all_rows(comparison, blocks)


def check_sizes(comparison: Comparison, sizes: Iterable[str]) -> None:
    """For sizes as on the command line."""
    for size in sizes:
        check = check_all_rows if size.startswith("rows:") else check_all
        check(comparison, int(size.removeprefix("rows:")))


if __name__ == "__main__":
    run_as_program(lambda comparison: check_sizes(comparison, sys.argv[2:]))
