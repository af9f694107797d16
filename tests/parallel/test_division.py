"""The part of each tensor rank in a parameter, over random divisions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.parallel.division import Division, Gradient, HeldRange, SharedRange
from megatron_zpp.system.user_error import UserError


@st.composite
def divisions(draw):
    """All parts of one division: by rows with any holders, or by columns."""
    ranks = draw(st.integers(1, 5))
    gradient = draw(st.sampled_from(Gradient))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    if len(shape) == 2 and draw(st.booleans()):
        shape = (shape[0], shape[1] * ranks)
        return [Division.evenly(shape, 1, ranks, rank) for rank in range(ranks)]
    cuts = sorted({0, shape[0], *draw(st.lists(st.integers(0, shape[0]), max_size=4))})
    holders = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    ranges = [HeldRange(start, stop, draw(holders)) for start, stop in itertools.pairwise(cuts)]
    everybody = tuple(range(ranks))
    ranges.append(HeldRange(shape[0], shape[0] + 1, everybody))  # so that each rank holds something
    return [Division((shape[0] + 1, *shape[1:]), 0, tuple(ranges), rank, gradient) for rank in range(ranks)]


def part_of(whole, division):
    """The rank's part, by numpy's own slicing."""
    ranges = [held for held in division.ranges if division.rank in held.holders]
    return np.concatenate([np.take(whole, range(held.start, held.stop), axis=division.dim) for held in ranges], axis=division.dim)


def elements(whole, stripe):
    matrix = whole.reshape(whole.shape[0], -1)
    return matrix[:, stripe.columns[0] : stripe.columns[1]].ravel()[stripe.start : stripe.stop]


@given(divisions(), st.data())
def test_the_stripes_of_a_range_are_the_elements_of_the_part(parts, data):
    whole = np.arange(parts[0].numel).reshape(parts[0].shape)
    for division in parts:
        part = part_of(whole, division)
        assert part.shape == division.local_shape
        start = data.draw(st.integers(0, part.size))
        stop = data.draw(st.integers(start, part.size))
        position = start
        for placed in division.stripes(start, stop):
            assert placed.offset == position
            found = elements(whole, placed.stripe)
            assert found.size == placed.stripe.numel > 0
            assert np.array_equal(found, part.ravel()[position : position + found.size])
            position += found.size
        assert position == stop


@given(divisions())
def test_the_counted_elements_of_all_parts_are_the_whole_once(parts):
    whole = np.arange(parts[0].numel).reshape(parts[0].shape)
    counted = []
    for division in parts:
        part = part_of(whole, division).ravel()
        is_counted = np.ones(part.size, dtype=bool)
        for shared in division.shared():
            is_counted[shared.start : shared.stop] = shared.counted
        counted.extend(part[is_counted])
    assert sorted(counted) == list(range(whole.size))


@given(divisions())
def test_a_shared_range_is_the_same_elements_on_each_of_its_holders(parts):
    whole = np.arange(parts[0].numel).reshape(parts[0].shape)
    held = {}
    for division in parts:
        part = part_of(whole, division).ravel()
        for shared in division.shared():
            assert division.rank in shared.holders
            assert len(shared.holders) > 1
            held.setdefault((shared.holders, tuple(part[shared.start : shared.stop])), []).append(division.rank)
    assert all(list(holders) == ranks for (holders, _), ranks in held.items())


@given(divisions())
def test_a_part_has_no_more_stripes_than_runs(parts):
    for division in parts:
        ranges = [held for held in division.ranges if division.rank in held.holders]
        assert len(list(division.stripes(0, math.prod(division.local_shape)))) <= len(ranges)


def test_the_picture_in_the_module_is_true():
    ranges = (HeldRange(0, 2, (0,)), HeldRange(2, 4, (1,)), HeldRange(4, 6, (0, 1)))
    division = Division((6, 2), 0, ranges, 1, Gradient.PARTIAL)
    assert division.local_shape == (4, 2)
    assert list(division.shared()) == [SharedRange(4, 8, (0, 1), False, Gradient.PARTIAL)]
    (placed,) = division.stripes(0, 8)  # rows 2 to 5 are neighbours
    assert (placed.offset, placed.stripe.start, placed.stripe.stop) == (0, 4, 12)


def test_an_undivided_parameter_of_one_rank_is_one_stripe_and_shared_with_nobody():
    division = Division.undivided((3, 4))
    assert not list(division.shared())
    (placed,) = division.stripes(2, 9)
    assert (placed.offset, placed.stripe.columns, placed.stripe.start, placed.stripe.stop) == (2, (0, 4), 2, 9)


@given(st.lists(st.integers(0, 3), max_size=4).map(tuple), st.integers(1, 3))
def test_each_rank_has_all_of_an_undivided_parameter_of_any_shape(shape, ranks):
    numel = math.prod(shape)
    for rank in range(ranks):
        division = Division.undivided(shape, ranks, rank)
        assert division.local_shape == division.shape == shape
        stripes = [(placed.offset, placed.stripe.start, placed.stripe.stop) for placed in division.stripes(0, numel)]
        assert stripes == ([(0, 0, numel)] if numel else [])
        shared = [(shared.start, shared.stop, shared.counted) for shared in division.shared()]
        assert shared == ([(0, numel, rank == 0)] if numel and ranks > 1 else [])


@pytest.mark.parametrize(
    ("shape", "dim", "ranges", "rank", "message"),
    [
        ((4, 4), 2, (HeldRange(0, 4, (0,)),), 0, "cannot be divided along dim 2"),
        ((2, 2, 2), 1, (HeldRange(0, 2, (0,)),), 0, "cannot be divided along dim 1"),
        ((2,), 1, (HeldRange(0, 1, (0,)),), 0, "cannot be divided along dim 1"),
        ((2, 0), 1, (), 0, "holds 0 ranges"),
        ((4,), 0, (HeldRange(0, 3, (0,)),), 0, "end at 3"),
        ((4,), 0, (HeldRange(1, 4, (0,)),), 0, "does not continue"),
        ((4,), 0, (HeldRange(0, 4, ()),), 0, "does not continue"),
        ((4,), 0, (HeldRange(0, 4, (1, 0)),), 0, "does not continue"),
        ((4,), 0, (HeldRange(0, 4, (0,)),), 1, "holds 0 ranges"),
        ((2, 4), 1, (HeldRange(0, 2, (0,)), HeldRange(2, 4, (0,))), 0, "holds 2 ranges"),
    ],
)
def test_ranges_that_are_no_division_are_refused(shape, dim, ranges, rank, message):
    with pytest.raises(UserError, match=message):
        Division(shape, dim, ranges, rank)
