"""A library's kernels on payloads that no encoder makes, and on means that are NaN. As a program, for the library it is given."""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch import Tensor

from harness.kernel_bits import BITS, DTYPES, decoded, mean, recoded
from harness.per_block import equal_bits
from megatron_zpp.ops import reference
from megatron_zpp.ops.payload import coded_bytes

BLOCK = 32
BLOCKS = 40
SCALES = (1.0, -1.0, 0.0, -0.0, 2.0**-149, 2.0**127, -(2.0**127), float("inf"), -float("inf"), float("nan"))


def any_payloads(members: int, bits: int) -> Tensor:
    """[members, 2, bytes]: every byte as a code, under scales of all kinds, those of members differing."""
    row_bytes, codes_bytes = coded_bytes(BLOCK * BLOCKS, bits, BLOCK), BLOCK * BLOCKS * bits // 8
    generator = torch.Generator().manual_seed(members)
    payloads = torch.randint(0, 256, (members, 2, row_bytes), dtype=torch.uint8, generator=generator)
    choice = torch.randint(0, len(SCALES), (members, 2, BLOCKS), generator=generator)
    scales = torch.tensor(SCALES)[choice].contiguous()
    payloads[:, :, codes_bytes : codes_bytes + 4 * BLOCKS] = scales.view(torch.uint8)
    return payloads


def check_any_payloads() -> int:
    """Raises AssertionError at the first differing bit; returns how many results were compared."""
    ops, run_numel, compared = torch.ops.megatron_zpp, BLOCK * BLOCKS, 0
    for bits in BITS:
        for members in (1, 2, 3, 5, 8):
            payloads = any_payloads(members, bits)
            for dtype in DTYPES:
                arguments = (payloads[0], run_numel, dtype, bits, BLOCK)
                assert equal_bits(decoded(ops, *arguments), decoded(reference, *arguments)), (bits, dtype)
            for accumulate, rotated in product((False, True), repeat=2):
                arguments = (payloads, run_numel, bits, BLOCK, accumulate, rotated)
                assert equal_bits(mean(ops, *arguments), mean(reference, *arguments)), (bits, members, accumulate, rotated)
            for next_bits, noise_key in product(BITS, (None, 1)):
                arguments = (payloads, run_numel, bits, next_bits, BLOCK, noise_key)
                assert equal_bits(recoded(ops, *arguments), recoded(reference, *arguments)), (bits, members, next_bits, noise_key)
            compared += 11
    return compared


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.ops.load_library(sys.argv[1])
    print(check_any_payloads())
