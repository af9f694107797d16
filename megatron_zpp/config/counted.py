"""Numbers of things and of bytes, in words."""

from __future__ import annotations


def counted(number: int, noun: str, nouns: str = "") -> str:
    """`1 rank`, `2 ranks`. nouns: the plural, if it is not the noun with an s."""
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def in_gib(nbytes: int) -> str:
    """`4.3 GiB`, and in MiB if it is less than a tenth of a GiB."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.1f} MiB"
