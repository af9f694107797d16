"""Every kernel once, or a few times, against the reference, bit for bit. As a program: for a library, and for numbers of values per block.

Fewer values than in the programs beside it, for a machine on which a launch takes long. The loss has no bits of a reference, but bounds.
"""

from __future__ import annotations

import sys
from itertools import cycle, product

import torch

from harness import gaussian_bits, softmax_errors
from harness.kernel_bits import BITS, DTYPES, Comparison, decoded, encoded, kinds_of_values, mean, recoded
from harness.mean_bits import values_of, without_nan_bits
from harness.per_block import equal_bits
from megatron_zpp.ops import dropout_reference, gaussian_reference, reference
from megatron_zpp.ops.payload import GAUSSIAN_BITS, GAUSSIAN_ROUNDS

MIXED = (0, 3, 5, 9, 12, 16)  # of kinds_of_values: ordinary, subnormal, huge, with ties, with NaN, with -infinity
NOISE_KEYS = (None, 3)
OPS = torch.ops.megatron_zpp


def check_blocks(block_numel: int) -> int:
    """Kernels of integers, on blocks of different kinds."""
    comparison, noise_keys = Comparison(OPS), cycle(NOISE_KEYS)
    for dtype, bits in product(DTYPES, BITS):
        kinds = list(kinds_of_values(dtype, block_numel))
        values = torch.cat([kinds[kind] for kind in MIXED], dim=1)
        run_numel = values.shape[1]
        for rotated in (False, True):
            payloads = comparison.same(encoded, values, bits, block_numel, rotated, next(noise_keys))
        for output in DTYPES if dtype == torch.float32 else ():
            comparison.same(decoded, payloads, run_numel, output, bits, block_numel)
        if dtype == torch.float32:
            received = torch.stack([payloads, payloads.flip(0), payloads])
            comparison.same(mean, received, run_numel, bits, block_numel, bits == BITS[0], bits == BITS[1])
            for next_bits in BITS:
                comparison.same(recoded, received[: next_bits // 4], run_numel, bits, next_bits, block_numel, next(noise_keys))
    return comparison.compared


def check_gaussian() -> int:
    compared = 0
    for (dtype, bits, rounds), number in zip(product(DTYPES, GAUSSIAN_BITS, GAUSSIAN_ROUNDS), cycle(MIXED)):
        values = list(gaussian_bits.kinds(dtype, 2 * gaussian_bits.BLOCK))[number]
        keys = list(gaussian_bits.KEYS)
        given = (values, bits, rounds, keys[0])
        payloads = gaussian_bits.encoded(gaussian_reference, *given)
        assert equal_bits(gaussian_bits.encoded(OPS, *given), payloads), (dtype, bits, rounds)
        back = (payloads, values.shape[1], dtype, bits, rounds, keys, rounds == 2)
        assert equal_bits(gaussian_bits.decoded(OPS, *back), gaussian_bits.decoded(gaussian_reference, *back)), (dtype, bits, rounds)
        compared += 2
        if dtype == torch.float32:
            members = (torch.stack([payloads, payloads.flip(0)]), values.shape[1], bits, rounds, keys[:2], rounds == 1)
            assert equal_bits(gaussian_bits.mean(OPS, *members), gaussian_bits.mean(gaussian_reference, *members)), (bits, rounds)
            compared += 1
    return compared


def check_exact() -> int:
    """Means of values that are not quantized, and dropout."""
    compared = 0
    for dtype in DTYPES:
        members = values_of(dtype, 3, 1030)
        for stored, accumulate in ((torch.float32, True), (dtype, False)):
            found, expected = (torch.ones(members.shape[1:], dtype=stored) for _ in range(2))
            OPS.mean_values(members, found, accumulate)
            reference.mean_values(members, expected, accumulate)
            assert equal_bits(without_nan_bits(found), without_nan_bits(expected)), (dtype, stored)
        values = values_of(dtype, 1, 1030).flatten()
        found, expected = torch.empty_like(values), torch.empty_like(values)
        given = (2**62 + 1, 2**32 - 40, 1 << 30, 4 / 3)  # an index that passes 2^32
        OPS.drop_values(values, found, *given)
        dropout_reference.drop_values(values, expected, *given)
        assert equal_bits(without_nan_bits(found), without_nan_bits(expected)), dtype
        compared += 3
    return compared


def check_loss() -> int:
    for dtype in DTYPES:
        case = softmax_errors.case_of(dtype, 40)
        wide, narrow = softmax_errors.places(40)[1:]
        softmax_errors.check_place(case, wide, narrow, "cpu")
        softmax_errors.check_place(case, narrow, wide, "cpu")
        softmax_errors.check_odd_logits(dtype, "cpu")
    return 2 * len(DTYPES)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.ops.load_library(sys.argv[1])
    print(sum(map(check_blocks, map(int, sys.argv[2:]))) + check_gaussian() + check_exact() + check_loss())
