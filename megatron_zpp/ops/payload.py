"""Sizes of quantized values (no torch). Each part of a payload row is padded to 16 bytes.

| codes of 4 or 8 bits | one fp32 scale per block |
| one bf16 scale per block of 256 | Gaussian codes of 1 to 4 bits |
"""

from __future__ import annotations

BITS = (4, 8)
BLOCK_NUMEL_MULTIPLE = 32
SCALE_BYTES = 4
GAUSSIAN_BITS = (1, 2, 3, 4)
GAUSSIAN_BLOCK_NUMEL = 256
GAUSSIAN_SCALE_BYTES = 2
GAUSSIAN_ROUNDS = (1, 2)
PART_ALIGNMENT_BYTES = 16


def coded_bytes(row_numel: int, bits: int, block_numel: int) -> int:
    """Bytes of the codes and scales of a row of values.

    bits: 4 or 8. block_numel: a multiple of 32. row_numel: a multiple of block_numel. Raises ValueError for anything else.
    """
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; expected 4 or 8.")
    if block_numel <= 0 or block_numel % BLOCK_NUMEL_MULTIPLE:
        raise ValueError(f"block_numel is {block_numel}; expected a multiple of {BLOCK_NUMEL_MULTIPLE}.")
    if row_numel < 0 or row_numel % block_numel:
        raise ValueError(f"a row has {row_numel} values; expected a multiple of block_numel, {block_numel}.")
    return padded_bytes(row_numel // 8 * bits) + padded_bytes(row_numel // block_numel * SCALE_BYTES)


def gaussian_bytes(row_numel: int, bits: int) -> int:
    """Bytes of the scales and Gaussian codes of a row of values.

    bits: 1 to 4. row_numel: a multiple of 256. Raises ValueError for anything else.
    """
    if bits not in GAUSSIAN_BITS:
        raise ValueError(f"bits is {bits}; expected 1, 2, 3 or 4.")
    if row_numel < 0 or row_numel % GAUSSIAN_BLOCK_NUMEL:
        raise ValueError(f"a row has {row_numel} values; expected a multiple of {GAUSSIAN_BLOCK_NUMEL}.")
    return padded_bytes(row_numel // GAUSSIAN_BLOCK_NUMEL * GAUSSIAN_SCALE_BYTES) + row_numel // 8 * bits


def padded_bytes(part_bytes: int) -> int:
    """`part_bytes` rounded up to a multiple of 16."""
    return -(-part_bytes // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES
