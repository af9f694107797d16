"""The elements of some columns of a parameter, counted in other columns (pure arithmetic, no torch).

Every parameter is seen as a matrix (see parallel/division.py). The elements of some columns are counted row after row. A matrix [2, 4],
with the number of each element in its columns 0 to 3 and in its columns 1 to 3:

    0 1 2 .      . 0 1 .
    3 4 5 .      . 2 3 .
"""

from __future__ import annotations

import math

from megatron_zpp.parallel.division import Stripe

Columns = tuple[int, int]


def columns_of(shape: tuple[int, ...]) -> Columns:
    """All columns of a whole parameter."""
    return 0, math.prod(shape[1:])


def column_numel(shape: tuple[int, ...]) -> int:
    """The number of elements of one column of a whole parameter."""
    return shape[0] if shape else 1


def converted(element: int, columns: Columns, others: Columns) -> int:
    """The number in the columns `others` of the first element that is not before number `element` of `columns`.

    If `others` are inside `columns`, elements [start, stop) of `columns` have in `others` the numbers from converted(start) to
    converted(stop).
    """
    if columns == others:
        return element
    row, place = divmod(element, columns[1] - columns[0])
    width = others[1] - others[0]
    return row * width + min(max(columns[0] + place - others[0], 0), width)


def words_of(stripe: Stripe, shape: tuple[int, ...]) -> str:
    """A stripe of a parameter in words."""
    elements = f"elements {stripe.start} to {stripe.stop}"
    if stripe.columns == columns_of(shape):
        return elements
    return f"{elements} of columns {stripe.columns[0]} to {stripe.columns[1]}"
