"""A library's kernels on rows that end where memory ends, beside which nothing may be read or written, and that start anywhere.

As a program, for the library it is given. A stray access ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
from itertools import product

import torch
from torch import Tensor

from megatron_zpp.ops.payload import coded_bytes
from testbed.kernels.bit_differences import Comparison, Ops, run_as_program
from testbed.kernels.kernel_bits import BITS, DTYPES, UNTOUCHED
from testbed.kernels.mean_bits import GUARD, placed

NO_ACCESS = 0  # PROT_NONE of mmap(2)


def at_the_end_of_memory(values: Tensor) -> Tensor:
    """A copy of a contiguous tensor whose last byte is followed by a page that nobody may touch."""
    pages = -(-values.nbytes // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + pages * mmap.PAGESIZE), mmap.PAGESIZE, NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=pages * mmap.PAGESIZE - values.nbytes)
    return copy.view(values.shape).copy_(values)


def placed_at_the_end(values: Tensor, first: int, gap: int) -> tuple[Tensor, Tensor]:
    """A flat storage with guards, and the rows in it that have the values. The last row ends with its run, and memory with it."""
    storage, _ = placed(values, first, gap)
    flat = at_the_end_of_memory(storage.flatten()[: storage.numel() - gap].contiguous())
    return flat, flat.as_strided(values.shape, (storage.shape[1], 1), first)


def with_last_gap(flat: Tensor, slices: int, gap: int) -> Tensor:
    """A storage of placed_at_the_end as a matrix."""
    return torch.cat([flat, torch.full((gap,), GUARD, dtype=flat.dtype)]).view(slices, -1)


def encoded(
    ops: Ops, values: Tensor, first: int, gap: int, bits: int, block_numel: int, rotated: bool = False, noise_key: int | None = None
) -> Tensor:
    """Payloads of three members with the same values."""
    _, runs = placed_at_the_end(values, first, gap)
    payloads = torch.full((3, len(values), coded_bytes(values.shape[1], bits, block_numel)), UNTOUCHED, dtype=torch.uint8)
    payloads = at_the_end_of_memory(payloads)
    for member in payloads:
        ops.encode_blocks(runs, member, bits, block_numel, rotated, noise_key)
    return payloads


def decoded(ops: Ops, payloads: Tensor, values: Tensor, first: int, gap: int, bits: int, block_numel: int) -> Tensor:
    flat, runs = placed_at_the_end(torch.zeros_like(values), first, gap)
    ops.decode_blocks(at_the_end_of_memory(payloads), runs, bits, block_numel)
    return with_last_gap(flat, len(values), gap)


def mean(
    ops: Ops, payloads: Tensor, values: Tensor, first: int, gap: int, bits: int, block_numel: int, accumulate: bool, rotated: bool
) -> Tensor:
    flat, runs = placed_at_the_end(values, first, gap)
    ops.decode_mean_blocks(at_the_end_of_memory(payloads), runs, bits, block_numel, accumulate, rotated)
    return with_last_gap(flat, len(values), gap)


def recoded(ops: Ops, payloads: Tensor, row_numel: int, bits: int, next_bits: int, block_numel: int) -> Tensor:
    row_bytes = coded_bytes(row_numel, next_bits, block_numel)
    target = at_the_end_of_memory(torch.full((payloads.shape[1], row_bytes), UNTOUCHED, dtype=torch.uint8))
    ops.recode_mean_blocks(at_the_end_of_memory(payloads), target, row_numel, bits, next_bits, block_numel)
    return target


def check_rows(comparison: Comparison, block_numel: int, blocks: int, first: int, gap: int, turn: int) -> None:
    """Compares the kernels of codes on rows of values that start `first` elements in, `gap` elements apart.

    Every dtype with one of the numbers of bits, by turns.
    """
    same, row_numel = comparison.same, block_numel * blocks
    for index, dtype in enumerate(DTYPES):
        bits = BITS[(index + turn) % len(BITS)]
        values = torch.randn(2, row_numel, generator=torch.Generator().manual_seed(blocks)).to(dtype)
        at_place = (values, first, gap, bits, block_numel)
        payloads, _, noisy = (same("encode_blocks", encoded, *at_place, *options) for options in ((), (True, None), (False, 1)))
        same("decode_blocks", decoded, payloads[2], *at_place)
        payloads[1] = noisy[1]
        before = torch.linspace(-1, 1, 2 * row_numel).view(2, -1)
        for options in product((False, True), repeat=2):
            same("decode_mean_blocks", mean, payloads, before, first, gap, bits, block_numel, *options)
        for next_bits in BITS:
            same("recode_mean_blocks", recoded, payloads, row_numel, bits, next_bits, block_numel)


def check_all_rows(comparison: Comparison) -> None:
    shapes = [(32, 1), (32, 67), (96, 5), (256, 9), (1056, 2)]
    places = ((0, 0), (0, 8), (1, 0), (3, 2))
    for (number, shape), (other, place) in product(enumerate(shapes), enumerate(places)):
        check_rows(comparison, *shape, *place, turn=number + other)


if __name__ == "__main__":
    run_as_program(check_all_rows)
