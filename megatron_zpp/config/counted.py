"""Numbers of things, in words."""

from __future__ import annotations


def counted(number: int, noun: str, nouns: str = "") -> str:
    """`1 rank`, `2 ranks`. nouns: the plural, if it is not the noun with an s."""
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"
