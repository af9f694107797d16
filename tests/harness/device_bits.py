"""Every kernel once, or a few times, against the reference, bit for bit. As a program: for a library, and for numbers of values per block.

Fewer values than in the programs beside it, for a machine on which a launch takes long. The loss has no bits of a reference, but bounds.
"""

from __future__ import annotations

import sys
from itertools import cycle, product

import torch

from megatron_zpp.ops.payload import GAUSSIAN_BITS, GAUSSIAN_ROUNDS
from testbed.kernels import dropout_bits, gaussian_bits, mean_bits, softmax_errors
from testbed.kernels.bit_differences import Comparison, run_as_program
from testbed.kernels.kernel_bits import BITS, DTYPES, check_ties, decoded, encoded, kinds_of_values, mean, recoded

MIXED = (0, 3, 5, 9, 12, 16)  # of kinds_of_values: ordinary, subnormal, huge, with ties, with NaN, with -infinity
NOISE_KEYS = (None, 3)


def check_blocks(comparison: Comparison, block_numel: int) -> None:
    """Compares kernels of integers, on blocks of different kinds."""
    same, noise_keys = comparison.same, cycle(NOISE_KEYS)
    for dtype, bits in product(DTYPES, BITS):
        kinds = list(kinds_of_values(dtype, block_numel))
        values = torch.cat([kinds[kind] for kind in MIXED], dim=1)
        row_numel = values.shape[1]
        for rotated in (False, True):
            payloads = same("encode_blocks", encoded, values, bits, block_numel, rotated, next(noise_keys))
        for output in DTYPES if dtype == torch.float32 else ():
            same("decode_blocks", decoded, payloads, row_numel, output, bits, block_numel)
        if dtype == torch.float32:
            received = torch.stack([payloads, payloads.flip(0), payloads])
            same("decode_mean_blocks", mean, received, row_numel, bits, block_numel, bits == BITS[0], bits == BITS[1])
            for next_bits in BITS:
                some = received[: next_bits // 4]
                same("recode_mean_blocks", recoded, some, row_numel, bits, next_bits, block_numel, next(noise_keys))


def check_gaussian(comparison: Comparison) -> None:
    same, keys = comparison.same, list(gaussian_bits.KEYS)
    for (dtype, bits, rounds), number in zip(product(DTYPES, GAUSSIAN_BITS, GAUSSIAN_ROUNDS), cycle(MIXED)):
        values = list(gaussian_bits.kinds(dtype, 2 * gaussian_bits.BLOCK))[number]
        row_numel = values.shape[1]
        payloads = same("encode_gaussian", gaussian_bits.encoded, values, bits, rounds, keys[0])
        same("decode_gaussian", gaussian_bits.decoded, payloads, row_numel, dtype, bits, rounds, keys, rounds == 2)
        if dtype == torch.float32:
            members = torch.stack([payloads, payloads.flip(0)])
            same("decode_mean_gaussian", gaussian_bits.mean, members, row_numel, bits, rounds, keys[:2], rounds == 1)


def check_exact(comparison: Comparison) -> None:
    """Compares means of values that are not quantized, and dropout."""
    for dtype in DTYPES:
        members = mean_bits.values_of(dtype, 3, 1030)
        for stored, accumulate in ((torch.float32, True), (dtype, False)):
            before = torch.ones(members.shape[1:], dtype=stored)
            comparison.same("mean_values", mean_bits.mean, members, before, 0, 0, accumulate)
        values = mean_bits.values_of(dtype, 1, 1030).flatten()
        given = (2**62 + 1, 2**32 - 40, 1 << 30, 4 / 3)  # an index that passes 2^32
        comparison.same("drop_values", dropout_bits.dropped, values, 0, 0, *given)


def check_loss(comparison: Comparison) -> None:
    for dtype in DTYPES:
        case = softmax_errors.case_of(dtype, 40)
        wide, narrow = softmax_errors.places(40)[1:]
        for places in ((wide, narrow), (narrow, wide)):
            softmax_errors.check_place(comparison, case, *places)
            comparison.compared += 1
        softmax_errors.check_odd_logits(comparison, dtype)


def check_all(comparison: Comparison, block_numels: list[int]) -> None:
    for block_numel in block_numels:
        check_blocks(comparison, block_numel)
        check_ties(comparison, block_numel, 1)
    check_gaussian(comparison)
    check_exact(comparison)
    check_loss(comparison)


if __name__ == "__main__":
    run_as_program(lambda comparison: check_all(comparison, list(map(int, sys.argv[2:]))))
