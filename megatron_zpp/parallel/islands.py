"""Cuts a world into islands, and joins the ranks that have the same place on each (pure arithmetic, no torch).

Six ranks on three islands:

    island 0    rank 0    rank 1
    island 1    rank 2    rank 3
    island 2    rank 4    rank 5
                   ^
                   a column
"""

from __future__ import annotations


def ranks_of_islands(world_size: int, islands: int) -> list[range]:
    """The ranks of each island. islands: how many, a divisor of world_size."""
    size = world_size // islands
    return [range(first, first + size) for first in range(0, world_size, size)]


def ranks_of_columns(world_size: int, islands: int) -> list[range]:
    """The ranks of each column, in the order of the islands."""
    size = world_size // islands
    return [range(place, world_size, size) for place in range(size)]
