"""A library's kernels on rows that end where memory ends, beside which nothing may be read or written, and that start anywhere.

As a program, for the library it is given: raises AssertionError at the first differing bit; a stray access ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from itertools import product

import torch
from torch import Tensor

from harness.kernel_bits import BITS, DTYPES, UNTOUCHED
from harness.per_block import equal_bits
from megatron_zpp.ops import reference
from megatron_zpp.ops.payload import coded_bytes

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


def check_rows(block_numel: int, blocks: int, first: int, gap: int) -> int:
    """Raises AssertionError at the first differing bit. Rows of values start `first` elements in, `gap` elements apart."""
    run_numel, compared = block_numel * blocks, 0
    for dtype, bits in product(DTYPES, BITS):
        rows = torch.randn(2, first + run_numel + gap, generator=torch.Generator().manual_seed(blocks)).to(dtype)
        # The last row ends with its run, and memory with it.
        flat = at_the_end_of_memory(rows.flatten()[: rows.numel() - gap].contiguous())
        runs = flat.as_strided((2, run_numel), (rows.shape[1], 1), first)
        row_bytes = coded_bytes(run_numel, bits, block_numel)
        payloads = at_the_end_of_memory(torch.full((3, 2, row_bytes), UNTOUCHED, dtype=torch.uint8))
        expected = payloads.clone()
        for member in range(3):
            torch.ops.megatron_zpp.encode_blocks(runs, payloads[member], bits, block_numel)
            reference.encode_blocks(runs, expected[member], bits, block_numel)
        assert equal_bits(payloads, expected), (dtype, bits)
        for rotated, noise_key in ((True, None), (False, 1)):
            torch.ops.megatron_zpp.encode_blocks(runs, payloads[1], bits, block_numel, rotated, noise_key)
            reference.encode_blocks(runs, expected[1], bits, block_numel, rotated, noise_key)
            assert equal_bits(payloads, expected), (dtype, bits, rotated, noise_key)
        before = flat.clone()
        torch.ops.megatron_zpp.decode_blocks(payloads[2], runs, bits, block_numel)
        reference.decode_blocks(expected[2], before.as_strided(runs.shape, runs.stride(), first), bits, block_numel)
        assert equal_bits(flat, before), (dtype, bits)
        compared += 4 + _check_means(payloads, run_numel, bits, block_numel, first, gap)
    return compared


def _check_means(payloads: Tensor, run_numel: int, bits: int, block_numel: int, first: int, gap: int) -> int:
    stride = first + run_numel + gap
    flat = at_the_end_of_memory(torch.linspace(-1, 1, 2 * stride - gap))
    before = flat.clone()
    for options in ((True, False), (True, True), (False, True), (False, False)):
        torch.ops.megatron_zpp.decode_mean_blocks(
            payloads, flat.as_strided((2, run_numel), (stride, 1), first), bits, block_numel, *options
        )
        reference.decode_mean_blocks(payloads, before.as_strided((2, run_numel), (stride, 1), first), bits, block_numel, *options)
        assert equal_bits(flat, before), (bits, options)
    for next_bits in BITS:
        recoded = at_the_end_of_memory(torch.full((2, coded_bytes(run_numel, next_bits, block_numel)), UNTOUCHED, dtype=torch.uint8))
        expected = recoded.clone()
        torch.ops.megatron_zpp.recode_mean_blocks(payloads, recoded, run_numel, bits, next_bits, block_numel)
        reference.recode_mean_blocks(payloads, expected, run_numel, bits, next_bits, block_numel)
        assert equal_bits(recoded, expected), (bits, next_bits)
    return 6


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.ops.load_library(sys.argv[1])
    shapes = [(32, 1), (32, 67), (96, 5), (256, 9), (1056, 2)]
    print(sum(check_rows(*shape, first, gap) for shape in shapes for first, gap in ((0, 0), (0, 8), (1, 0), (3, 2))))
