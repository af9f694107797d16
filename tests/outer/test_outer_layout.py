"""Where the parts of a slice have the elements of the slice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.outer.unit import outer_layout
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.specs import ParamSpec
from megatron_zpp.zero.layout import FlatLayout

pytestmark = pytest.mark.pure

SHAPES = st.lists(st.one_of(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.tuples(st.integers(1, 30))), min_size=1, max_size=5)


def params_of(shapes: list[tuple[int, ...]]) -> list[ParamSpec]:
    return [ParamSpec(f"p{index}", Division.undivided(shape), torch.zeros, True) for index, shape in enumerate(shapes)]


def used(layout: FlatLayout, first: int, slices: int) -> list[tuple[str, int]]:
    """The region and the place in it of every element that is no padding."""
    boundary = slices * layout.slice_shape.blocks
    places = [
        place
        for segment in layout.segments(first, slices)
        for place in range(segment.offset, segment.offset + segment.stop - segment.start)
    ]
    return sorted(("blocks", place) if place < boundary else ("exact", place - boundary) for place in places)


@given(SHAPES, st.integers(1, 4), st.integers(1, 5), st.sampled_from([4, 8]))
def test_the_parts_have_each_element_of_the_slice_at_its_place_and_nothing_else(
    shapes: list[tuple[int, ...]], slices: int, islands: int, block_numel: int
) -> None:
    inner = FlatLayout(params_of(shapes), slices, block_numel)
    for own_slice in range(slices):
        outer, expected = outer_layout(inner, own_slice, islands), used(inner, own_slice, 1)
        assert (outer is None) == (not expected)
        if outer is not None:
            assert used(outer, 0, islands) == expected
            assert outer.slices == islands
            assert outer.slice_shape.blocks % block_numel == 0
