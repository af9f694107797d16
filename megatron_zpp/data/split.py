"""Divides the documents of a corpus into training, validation and test documents, as --split says."""

import math
from itertools import accumulate

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(split: str) -> tuple[float, float, float]:
    """Three fractions with sum 1 from a --split such as "969, 30, 1". Parts missing at the end are 0; "/" is a separator too.

    Raises ValueError, naming --split, unless it has one to three non-negative numbers and at least one is positive.
    """
    example = f'give up to three numbers for training, validation and test, for example "969, 30, 1"; found "{split}".'
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        raise ValueError(f"--split is not a list of numbers: {example}") from None
    if len(parts) > 3:
        raise ValueError(f"--split has {len(parts)} parts: {example}")
    if not all(part >= 0 for part in parts) or not 0 < sum(parts) < math.inf:
        raise ValueError(f"--split has a part that is negative, not a number or too large, or none that is positive: {example}")
    total = sum(parts)
    train, valid, test = ([part / total for part in parts] + [0.0, 0.0])[:3]
    return train, valid, test


def split_boundaries(fractions: tuple[float, float, float], document_count: int) -> tuple[int, int, int, int]:
    """(0, training end, validation end, test end) in documents. Each cumulative fraction is rounded, as Megatron Core does."""
    _, train, valid, test = (min(round(end * document_count), document_count) for end in accumulate(fractions, initial=0.0))
    return 0, train, valid, test


def split_documents(split: str, document_count: int) -> dict[str, range]:
    """The documents of each split ("train", "valid", "test"); a range may be empty."""
    ends = split_boundaries(parse_split(split), document_count)
    return {name: range(start, stop) for name, start, stop in zip(SPLIT_NAMES, ends[:-1], ends[1:], strict=True)}
