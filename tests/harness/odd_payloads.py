"""A library's kernels on payloads that no encoder makes, and on means that are NaN. As a program, for the library it is given."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from megatron_zpp.ops.payload import coded_bytes
from testbed.kernels.bit_differences import Comparison, run_as_program
from testbed.kernels.kernel_bits import BITS, DTYPES, decoded, mean, recoded

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


def check_any_payloads(comparison: Comparison) -> None:
    same, row_numel = comparison.same, BLOCK * BLOCKS
    for bits, members in product(BITS, (1, 2, 3, 5, 8)):
        payloads = any_payloads(members, bits)
        for dtype in DTYPES:
            same("decode_blocks", decoded, payloads[0], row_numel, dtype, bits, BLOCK)
        for accumulate, rotated in product((False, True), repeat=2):
            same("decode_mean_blocks", mean, payloads, row_numel, bits, BLOCK, accumulate, rotated)
        for next_bits, noise_key in product(BITS, (None, 1)):
            same("recode_mean_blocks", recoded, payloads, row_numel, bits, next_bits, BLOCK, noise_key)


if __name__ == "__main__":
    run_as_program(check_any_payloads)
