"""The bytes that one rank receives in the operations of the tensor link (pure arithmetic, no torch)."""

from __future__ import annotations

_ALIGNMENT = 16  # bytes; a part is a whole number of them, so that kernels read and write 16 at a time


def padded_part_numel(numel: int, ranks: int, element_bytes: int) -> int:
    """The elements of one rank's part of `numel`: as few as possible, and a whole number of 16 bytes."""
    step = ranks * max(1, _ALIGNMENT // element_bytes)
    return -(-numel // step) * step // ranks


def gathered_bytes(own_bytes: int, ranks: int) -> int:
    """Of a gather, if every rank has `own_bytes`."""
    return (ranks - 1) * own_bytes


def sum_scattered_bytes(nbytes: int, ranks: int) -> int:
    """Of a sum of `nbytes` of which every rank gets its part."""
    return (ranks - 1) * (nbytes // ranks)


def summed_bytes(numel: int, ranks: int, element_bytes: int) -> int:
    """Of a sum that every rank gets whole: of the exchange, and of the gather after it."""
    return 2 * (ranks - 1) * padded_part_numel(numel, ranks, element_bytes) * element_bytes
