"""The bytes of a source, whole and in windows."""

from __future__ import annotations

from itertools import pairwise

from harness.source_places import places_of
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.checkpoint.manifest import ELEMENT_BYTES
from megatron_zpp.checkpoint.source import RowSteps, Source, byte_ranges


@st.composite
def sources(draw: st.DrawFn) -> Source:
    """With or without gaps between its rows."""
    element_type = draw(st.sampled_from(sorted(ELEMENT_BYTES)))
    width = draw(st.integers(1, 6))
    lead = draw(st.integers(0, width - 1))
    stored, wanted = (width + draw(st.integers(0, 9)) for _ in range(2))
    rows = draw(st.sampled_from([None, RowSteps(width, lead, stored, wanted)]))
    return Source(
        "f", draw(st.integers(0, 20)) * ELEMENT_BYTES[element_type], draw(st.integers(0, 9)), draw(st.integers(1, 40)), element_type, rows
    )


@given(sources(), st.integers(0, 60), st.integers(0, 120))
def test_the_blocks_of_a_window_are_its_elements_once_each(source: Source, first: int, count: int) -> None:
    element_bytes = ELEMENT_BYTES[source.element_type]
    start, stop = first * element_bytes, (first + count) * element_bytes
    steps = source.rows or RowSteps(0, 0, 0, 0)
    blocks = list(source.blocks(start, stop))
    found = [
        (block.offset + (row * steps.stored + column) * element_bytes, block.first + row * steps.wanted + column)
        for block in blocks
        for row in range(block.rows)
        for column in range(block.width)
    ]
    assert found == [(byte, place) for byte, place in places_of(source) if start <= byte < stop]
    assert len(blocks) <= 3
    assert source.rows is not None or all(block.rows == 1 for block in blocks)


@given(st.lists(sources(), max_size=4), st.integers(1, 40))
def test_the_ranges_of_bytes_hold_all_elements_and_only_gaps_that_are_shorter_than_asked(found: list[Source], least_gap: int) -> None:
    ranges = list(byte_ranges(sorted(found, key=lambda source: source.offset), least_gap))
    assert ranges == sorted(ranges, key=lambda bounds: bounds[0])
    held = {byte for start, stop in ranges for byte in range(start, stop)}
    allowed: set[int] = set()
    for source in found:
        element_bytes = ELEMENT_BYTES[source.element_type]
        wanted = [byte + place for byte, _ in places_of(source) for place in range(element_bytes)]
        assert held >= set(wanted) and source.end == wanted[-1] + 1
        allowed |= set(wanted)
        allowed |= {byte for one, other in pairwise(wanted) if other - one <= least_gap for byte in range(one, other)}
    assert held <= allowed
