"""Divisors, for errors that say what to choose."""

from __future__ import annotations


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def nearest_divisors(number: int, wish: int) -> list[int]:
    """The up to four divisors of `number` nearest to `wish`, ascending."""
    return sorted(sorted(divisors(number), key=lambda divisor: abs(divisor - wish))[:4])
