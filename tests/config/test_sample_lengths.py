"""Lengths in tokens as samples, where the samples of a run have had several lengths."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.sample_lengths import SampleLengths, merged

STAGES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), max_size=4)


@given(st.integers(1, 9), STAGES, st.integers(0, 120))
def test_lengths_in_tokens_count_the_tokens_of_one_sample_after_the_other(
    seq_length: int, stages: list[tuple[int, int]], count: int
) -> None:
    lengths = SampleLengths(seq_length, tuple(stages))
    each = [length for number, length in stages for _ in range(number)] + [seq_length] * 130
    ends = list(accumulate(each, initial=0))
    assert lengths.tokens_in(count) == ends[count]
    assert lengths.samples_within(count) == max(index for index, end in enumerate(ends) if end <= count)
    assert lengths.samples_for(count) == min(index for index, end in enumerate(ends) if end >= count)


def test_neighbours_of_one_length_are_one_stage() -> None:
    assert merged([(0, 5), (3, 4), (2, 4), (0, 7), (1, 4), (2, 8)]) == ((6, 4), (2, 8))
