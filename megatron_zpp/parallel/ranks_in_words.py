"""Names ranks in messages (no torch)."""

from __future__ import annotations

from collections.abc import Iterable

MOST_NAMED = 8


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 1` or `ranks 1, 2`; of many only the first are named."""
    names = [str(rank) for rank in ranks]
    return f"{'rank' if len(names) == 1 else 'ranks'} {first_of(names)}"


def first_of(names: Iterable[str]) -> str:
    """`a, b`, each name once; of many only the first, and how many more there are."""
    listed = list(dict.fromkeys(names))
    return ", ".join(listed[:MOST_NAMED]) + (f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else "")
