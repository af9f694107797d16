"""Compares numbers of two runs. A number that is not finite never passes for equal, as it would under max()."""

from __future__ import annotations

import math
from collections.abc import Iterable


def largest_difference(own: Iterable[float], others: Iterable[float]) -> float:
    """The largest difference of two runs' numbers, pair by pair, as a share of `others`; 0 if there are none.

    It is inf if a number is NaN or inf, or if the other number alone is 0. Raises ValueError if the runs have not as many numbers.
    """
    return max((_difference(one, other) for one, other in zip(own, others, strict=True)), default=0.0)


def _difference(own: float, other: float) -> float:
    if not (math.isfinite(own) and math.isfinite(other)):
        return math.inf
    if own == other:
        return 0.0
    return abs(own - other) / abs(other) if other else math.inf
