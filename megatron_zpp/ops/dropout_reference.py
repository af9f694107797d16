"""The definition of dropout's mask, in plain torch. The kernels of csrc/dropout/ equal it bit for bit; without kernels it runs.

An element with the 64-bit index i is dropped, that is 0, if hash(key, i) < threshold, and else value * scale:

    threshold = round(p * 2^32)     so the probability of being dropped is p within 2^-33
    scale     = 1 / (1 - p)         in fp32; the product is fp32 too, and rounded once more to 16 bits if the values have 16

The hash is that of stochastic rounding (`reference.hashed`), of two words: the low half of i, counted from the first half of the mixed
key; and, for each 2^32 elements, the hash of the high half of i, counted from the second half of the mixed key. So of 2^32 elements whose
index has the same high half, exactly `threshold` are dropped. Training needs the right rate, and no correlation between elements whose
errors a matrix product or a residual sum adds up: other channels, tokens, samples, sites and seeds. tests/ops/test_dropout_mask.py tests
these, and that every bit of key and index changes half of a mask. The hash is not cryptographic, and need not be.

Results that are NaN have the bits 0x7fc00000 in fp32, 0x7fc0 in bf16 and 0x7e00 in fp16, because the NaNs of processors differ.
megatron_zpp.ops.dropout has checked the arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_zpp.ops.reference import NAN, UINT32, hashed, key_words

PART_NUMEL = 2**16  # hashed at a time: the integers of a hash take 8 bytes per element


def drop_values(values: Tensor, dropped: Tensor, key: int, first_index: int, threshold: int, scale: float) -> None:
    parts = zip(values.view(-1).split(PART_NUMEL), dropped.view(-1).split(PART_NUMEL), strict=True)
    for number, (source, target) in enumerate(parts):
        first = first_index + number * PART_NUMEL
        hashes = element_hashes(key, first, source.numel(), source.device)
        products = source.float() * scale
        products.masked_fill_(products.isnan(), NAN).masked_fill_(hashes < threshold, 0)
        target.copy_(products)
        target.masked_fill_(target.isnan(), NAN)


def element_hashes(key: int, first_index: int, numel: int, device: torch.device) -> Tensor:
    """32-bit hashes, as int64, of the elements first_index, first_index + 1, ..."""
    first_word, second_word = key_words(key)
    indices = torch.arange(first_index, first_index + numel, device=device)
    first_high, last_high = first_index >> 32, (first_index + numel - 1) >> 32
    highs = torch.arange(first_high, last_high + 1, device=device)
    words = hashed((highs + second_word) & UINT32, torch.full_like(highs, first_word))
    return hashed((indices + first_word) & UINT32, words[(indices >> 32) - first_high])
