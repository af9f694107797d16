"""Elements of some columns, counted in other columns."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.parallel.division import Stripe
from megatron_zpp.parallel.stripes import column_numel, columns_of, converted, words_of


@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_a_converted_stripe_is_what_the_matrix_has_of_it_in_the_narrower_columns(rows: int, width: int, data: st.DataObject) -> None:
    def some_columns(first: int, last: int) -> tuple[int, int]:
        start = data.draw(st.integers(first, last - 1))
        return start, data.draw(st.integers(start + 1, last))

    columns = some_columns(0, width)
    others = some_columns(*columns)
    matrix = np.arange(rows * width).reshape(rows, width)
    elements, of_others = (matrix[:, slice(*which)].ravel() for which in (columns, others))
    start = data.draw(st.integers(0, elements.size))
    stop = data.draw(st.integers(start, elements.size))
    found = of_others[converted(start, columns, others) : converted(stop, columns, others)]
    assert set(found) == set(elements[start:stop]) & set(of_others)


def test_the_picture_in_the_module_is_true() -> None:
    assert [converted(element, (1, 3), (0, 3)) for element in range(4)] == [1, 2, 4, 5]
    assert [converted(element, (0, 3), (1, 3)) for element in range(6)] == [0, 0, 1, 2, 2, 3]


def test_every_parameter_is_a_matrix_whose_rows_are_its_first_dim() -> None:
    for shape, columns, numel in (((), (0, 1), 1), ((5,), (0, 1), 5), ((2, 3, 4), (0, 12), 2), ((6, 7), (0, 7), 6)):
        assert (columns_of(shape), column_numel(shape)) == (columns, numel)


def test_words_name_the_columns_unless_they_are_all() -> None:
    assert words_of(Stripe((0, 4), 2, 9), (5, 4)) == "elements 2 to 9"
    assert words_of(Stripe((0, 3), 2, 9), (5, 4)) == "elements 2 to 9 of columns 0 to 3"
