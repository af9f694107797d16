from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.parallel.division import Division, HeldRange
from megatron_zpp.parallel.specs import ParamSpec
from megatron_zpp.zero import layout as layout_module
from megatron_zpp.zero.layout import FlatLayout, Segment

shapes = st.lists(st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple), min_size=1, max_size=7)
layouts = st.builds(
    lambda some_shapes, slices, block_numel: FlatLayout(_params(some_shapes), slices, block_numel),
    shapes,
    st.integers(1, 12),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
)


def _params(some_shapes: list[tuple[int, ...]]) -> list[ParamSpec]:
    return [ParamSpec(f"p{index}", Division.undivided(shape), _no_values, index % 3 != 1) for index, shape in enumerate(some_shapes)]


def _no_values(start: int, stop: int) -> None:  # layouts never ask for values
    raise AssertionError


@st.composite
def divisions(draw: st.DrawFn) -> Division:
    """Rows, or elements, of which some are held by this rank alone, some by others too, and some by others alone."""
    lengths, rank = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)), draw(st.integers(0, 1))
    holders = [draw(st.sampled_from([(0,), (1,), (0, 1)])) for _ in lengths]
    holders[draw(st.integers(0, len(lengths) - 1))] = draw(st.sampled_from([(rank,), (0, 1)]))
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    ranges = [HeldRange(end - length, end, some) for end, length, some in zip(ends, lengths, holders, strict=True)]
    return Division((ends[-1], *draw(st.lists(st.integers(1, 6), max_size=1))), 0, tuple(ranges), rank)


def _part(index: int, division: Division) -> ParamSpec:
    return ParamSpec(f"p{index}", division, _no_values, True)


divided_units = st.lists(divisions(), min_size=1, max_size=5)
sizes = {"slices": st.integers(1, 12), "block_numel": st.sampled_from([1, 2, 4, 8])}


def _spans(layout: FlatLayout) -> dict[str, tuple[int, int]]:
    return {param.spec.name: (param.offset, param.offset + math.prod(param.spec.shape)) for param in layout.params}


@given(layouts)
def test_every_element_of_every_parameter_is_in_exactly_one_segment_of_exactly_one_slice(layout: FlatLayout) -> None:
    seen = {param.spec.name: np.zeros(math.prod(param.spec.shape), dtype=int) for param in layout.params}
    for index in range(layout.slices):
        for segment in layout.segments(index, 1):
            seen[segment.spec.name][segment.start : segment.stop] += 1
    assert all((counts == 1).all() for counts in seen.values())


@given(unit=divided_units, **sizes)
def test_segments_are_cut_where_shared_elements_begin_and_end_and_know_who_counts_them(
    unit: list[Division], slices: int, block_numel: int
) -> None:
    layout = FlatLayout([_part(index, division) for index, division in enumerate(unit)], slices, block_numel)
    segments = [segment for index in range(slices) for segment in layout.segments(index, 1)]
    for index, division in enumerate(unit):
        width = math.prod(division.shape[1:])
        own = [held for held in division.ranges if division.rank in held.holders]
        holders = [held.holders for held in own for _ in range((held.stop - held.start) * width)]  # of each element of the part
        seen = np.zeros(len(holders), dtype=int)
        for segment in segments:
            if segment.spec.name == f"p{index}":
                seen[segment.start : segment.stop] += 1
                (of_all,) = set(holders[segment.start : segment.stop])
                assert segment.counted == (of_all[0] == division.rank)
        assert (seen == 1).all()


@given(unit=divided_units, **sizes)
def test_shared_elements_have_the_places_of_others(unit: list[Division], slices: int, block_numel: int) -> None:
    shared, plain = (
        FlatLayout([_part(index, division) for index, division in enumerate(some)], slices, block_numel)
        for some in (unit, [Division.undivided(division.local_shape) for division in unit])
    )
    assert (plain.numel, plain.slice_shape) == (shared.numel, shared.slice_shape)
    for index in range(slices):
        offsets = {segment.spec.name: segment.offset - segment.start for segment in plain.segments(index, 1)}
        assert all(segment.offset - segment.start == offsets[segment.spec.name] for segment in shared.segments(index, 1))
        assert list(shared.paddings(index, 1)) == list(plain.paddings(index, 1))


@given(layouts)
def test_the_slices_of_all_ranks_tile_the_flat_unit_and_have_equal_parts_of_each_region(layout: FlatLayout) -> None:
    covered = np.zeros(layout.numel, dtype=int)
    lengths = set()
    for index in range(layout.slices):
        (blocks, blocks_at), (exact, exact_at) = layout.ranges_of(index, 1)
        covered[blocks.start : blocks.stop] += 1
        covered[exact.start : exact.stop] += 1
        lengths.add((blocks.stop - blocks.start, exact.stop - exact.start))
        assert (blocks_at, exact_at) == (0, blocks.stop - blocks.start)
    assert (covered == 1).all()
    assert lengths == {(layout.slice_shape.blocks, layout.slice_shape.exact)}
    assert layout.slice_numel * layout.slices == layout.numel


@given(layouts)
def test_no_quantization_block_mixes_two_parameters_or_crosses_a_slice(layout: FlatLayout) -> None:
    assert layout.slice_shape.blocks % layout.block_numel == 0
    owners: dict[int, str] = {}
    for name, (start, stop) in _spans(layout).items():
        if start < layout.blocks_numel:
            assert start % layout.block_numel == 0
            for block in range(start // layout.block_numel, -(-stop // layout.block_numel)):
                assert owners.setdefault(block, name) == name


@given(layouts)
def test_parameters_of_two_or_more_dimensions_are_in_the_blocks_region_and_the_others_in_the_exact_region(layout: FlatLayout) -> None:
    for param in layout.params:
        _, stop = _spans(layout)[param.spec.name]
        is_in_blocks = stop <= layout.blocks_numel
        assert is_in_blocks == (len(param.spec.shape) >= 2)
        assert is_in_blocks or param.offset >= layout.blocks_numel


@given(layouts, st.data())
def test_padding_is_what_no_parameter_covers_in_the_buffer_of_any_run_of_slices(layout: FlatLayout, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, layout.slices - 1))
    slices = data.draw(st.integers(1, layout.slices - first))
    covered = np.zeros(slices * layout.slice_numel, dtype=int)
    for segment in layout.segments(first, slices):
        covered[segment.offset : segment.offset + segment.stop - segment.start] += 1
    for padding in layout.paddings(first, slices):
        assert padding.start < padding.stop and not padding.start < slices * layout.slice_shape.blocks < padding.stop
        covered[padding.start : padding.stop] += 1
    assert (covered == 1).all()


@given(layouts, st.data())
def test_the_segments_of_a_run_of_slices_say_where_its_elements_stand_in_its_own_buffer(layout: FlatLayout, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, layout.slices - 1))
    slices = data.draw(st.integers(1, layout.slices - first))
    flat = np.zeros(layout.numel, dtype=int)  # each element a number of its own, 0 for padding
    for start, stop in _spans(layout).values():
        flat[start:stop] = np.arange(start, stop) + 1
    blocks = flat[: layout.blocks_numel].reshape(layout.slices, -1)[first : first + slices]
    exact = flat[layout.blocks_numel :].reshape(layout.slices, -1)[first : first + slices]
    buffer = np.concatenate([blocks.ravel(), exact.ravel()])
    rebuilt = np.zeros_like(buffer)
    for segment in layout.segments(first, slices):
        begin = _spans(layout)[segment.spec.name][0] + 1
        rebuilt[segment.offset : segment.offset + segment.stop - segment.start] = np.arange(begin + segment.start, begin + segment.stop)
    assert (rebuilt == buffer).all()


@given(layouts, st.data())
def test_ranges_cover_every_region_that_is_not_all_padding_once_and_keep_segments_of_different_keys_apart(
    layout: FlatLayout, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, layout.slices - 1))
    slices = data.draw(st.integers(1, layout.slices - first))
    ranges = list(layout.ranges_by(_decays, first, slices))
    assert [part for part, _ in ranges] == sorted((part for part, _ in ranges), key=lambda part: part.start)
    boundary = slices * layout.slice_shape.blocks
    are_in_blocks = {segment.offset < boundary for segment in layout.segments(first, slices)}
    covered = (True in are_in_blocks) * boundary + (False in are_in_blocks) * (slices * layout.slice_numel - boundary)
    assert sum(part.stop - part.start for part, _ in ranges) == covered
    assert all(part.start < part.stop and not part.start < boundary < part.stop for part, _ in ranges)
    for segment in layout.segments(first, slices):
        holding = [
            key for part, key in ranges if part.start <= segment.offset and segment.offset + segment.stop - segment.start <= part.stop
        ]
        assert holding == [segment.spec.weight_decay]


def _decays(segment: Segment) -> bool:
    return segment.spec.weight_decay


@given(shapes, st.sampled_from([1, 4, 16]))
def test_a_parameter_keeps_its_place_in_the_region_at_every_number_of_slices(some_shapes: list[tuple[int, ...]], block_numel: int) -> None:
    one, many = (FlatLayout(_params(some_shapes), slices, block_numel) for slices in (1, 6))
    place_in_region = [
        [param.offset - (0 if len(param.spec.shape) > 1 else layout.blocks_numel) for param in layout.params] for layout in (one, many)
    ]
    assert place_in_region[0] == place_in_region[1]


def test_the_picture_at_the_top_of_the_file_is_true() -> None:
    drawn = {line.split()[0]: line for line in (layout_module.__doc__ or "").splitlines() if line.startswith("    ")}
    params = [
        ParamSpec("weight", Division.undivided((3, 3)), _no_values, True),
        ParamSpec("bias", Division.undivided((3,)), _no_values, False),
    ]
    layout = FlatLayout(params, slices=4, block_numel=4)
    flat = _letters(layout, 0, 4)
    assert drawn["flat"].split()[1:] == _fours(flat[:16]) + ["|"] + _fours(flat[16:])
    assert drawn["offset"].split()[1:] == [str(offset) for offset in range(0, 32, 4)]
    assert drawn["slice"].split()[1:] == ["0", "1", "2", "3"] * 2
    own, secondary = drawn["primary"].removeprefix("    primary rung of slice 0").split("secondary rung of slices 0 and 1")
    assert own.split() == _fours(_letters(layout, 0, 1))
    assert secondary.split() == _fours(_letters(layout, 0, 2))


def _letters(layout: FlatLayout, first: int, slices: int) -> str:
    letters = ["."] * (slices * layout.slice_numel)
    for segment in layout.segments(first, slices):
        for offset in range(segment.offset, segment.offset + segment.stop - segment.start):
            letters[offset] = segment.spec.name[0]
    return "".join(letters)


def _fours(letters: str) -> list[str]:
    return [letters[start : start + 4] for start in range(0, len(letters), 4)]
