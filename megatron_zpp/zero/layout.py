"""Places every element of a unit, on every rung of every rank (pure arithmetic, no torch).

A unit has two regions: *blocks* (parameters of two or more dimensions, each starting at a quantization-block boundary) and *exact*
(parameters of one dimension). Each region is padded with zeros to a multiple of slices x block and cut into equal parts, one per slice.
The unit of a `weight` [3, 3] and a `bias` [3], cut into 4 slices with blocks of 4 elements (w: weight, b: bias, .: padding):

    region      blocks                            exact
    flat        wwww wwww w... .... | bbb. .... .... ....
    slice       0    1    2    3      0    1    2    3
    offset      0    4    8    12     16   20   24   28

    primary rung of slice 0    wwww bbb.      secondary rung of slices 0 and 1    wwww wwww bbb. ....
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_zpp.comm.code import SliceShape
from megatron_zpp.config.flag import next_multiple
from megatron_zpp.parallel.specs import ParamSpec
from megatron_zpp.system.user_error import UserError

Key = TypeVar("Key")


@dataclass(frozen=True)
class PlacedParam:
    """A parameter's place in the flat unit: `numel` elements from `offset` on."""

    spec: ParamSpec
    offset: int
    numel: int


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of one flattened parameter, at `offset` in the flat buffer of some rung.

    counted: whether this rank counts them in norms. False for elements that its tensor group shares and another rank counts.
    """

    spec: ParamSpec
    start: int
    stop: int
    offset: int
    counted: bool = True


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a flat buffer."""

    start: int
    stop: int


class FlatLayout:
    """The layout of one unit over `slices` primary slices with quantization blocks of `block_numel` elements."""

    def __init__(self, params: Sequence[ParamSpec], slices: int, block_numel: int) -> None:
        if not params:
            raise UserError("a unit needs at least one parameter")
        blocks = [param for param in params if len(param.shape) > 1]
        exact = [param for param in params if len(param.shape) <= 1]
        granule = slices * block_numel
        blocks_offsets, blocks_end = _place(blocks, block_numel)
        exact_offsets, exact_end = _place(exact, 1)
        self.slices = slices
        self.block_numel = block_numel
        self.blocks_numel = next_multiple(blocks_end, granule)
        self.exact_numel = next_multiple(exact_end, granule)
        self.numel = self.blocks_numel + self.exact_numel
        self.slice_shape = SliceShape(self.blocks_numel // slices, self.exact_numel // slices)
        self.slice_numel = self.slice_shape.numel
        self.params = tuple(
            [PlacedParam(spec, offset, _numel(spec)) for spec, offset in zip(blocks, blocks_offsets, strict=True)]
            + [PlacedParam(spec, self.blocks_numel + offset, _numel(spec)) for spec, offset in zip(exact, exact_offsets, strict=True)]
        )

    def ranges_of(self, first: int, slices: int) -> tuple[tuple[Range, int], tuple[Range, int]]:
        """The two ranges of the flat unit that hold `slices` slices from `first` on, each with its offset in the buffer of those slices."""
        blocks = Range(first * self.slice_shape.blocks, (first + slices) * self.slice_shape.blocks)
        exact = Range(self.blocks_numel + first * self.slice_shape.exact, self.blocks_numel + (first + slices) * self.slice_shape.exact)
        return (blocks, 0), (exact, slices * self.slice_shape.blocks)

    def segments(self, first: int, slices: int) -> Iterator[Segment]:
        """The segments in the flat buffer of `slices` slices from `first` on, in order.

        Those of a parameter are cut where elements begin or end that other tensor ranks share.
        """
        for part, base in self.ranges_of(first, slices):
            for param in self.params:
                start = max(part.start, param.offset)
                stop = min(part.stop, param.offset + param.numel)
                if start < stop:
                    yield from _segments(param.spec, start - param.offset, stop - param.offset, base + start - part.start)

    def paddings(self, first: int, slices: int) -> Iterator[Range]:
        """The ranges of the flat buffer of `slices` slices from `first` on that belong to no parameter, in order.

        No range spans the two regions. Padding holds zeros; where a codec has written to it, UnitGradient.clear_padding restores them.
        """
        boundary, stop = slices * self.slice_shape.blocks, slices * self.slice_numel
        end = 0
        for segment in self.segments(first, slices):
            yield from _gap(end, segment.offset, boundary)
            end = segment.offset + segment.stop - segment.start
        yield from _gap(end, stop, boundary)

    def runs(self, first: int, slices: int) -> Iterator[Range]:
        """The ranges between the paddings, in order, which parameters fill. No range spans the two regions."""
        boundary, end = slices * self.slice_shape.blocks, slices * self.slice_numel
        start = 0
        for padding in (*self.paddings(first, slices), Range(end, end)):
            yield from _gap(start, padding.start, boundary)
            start = padding.stop

    def ranges_by(self, key: Callable[[Segment], Key], first: int, slices: int) -> Iterator[tuple[Range, Key]]:
        """The ranges of the flat buffer of `slices` slices from `first` on, each with its key; cut where `key` changes and between regions.

        Padding belongs to the range of the segment before it, and is left out if there is none in the region. That does no harm: zeros
        stay zeros under AdamW and add nothing to a norm.
        """
        boundary, end = slices * self.slice_shape.blocks, slices * self.slice_numel
        segments = list(self.segments(first, slices))
        yield from _cut(Range(0, boundary), [segment for segment in segments if segment.offset < boundary], key)
        yield from _cut(Range(boundary, end), [segment for segment in segments if segment.offset >= boundary], key)


def _segments(spec: ParamSpec, start: int, stop: int, offset: int) -> Iterator[Segment]:
    """Elements [start, stop) of one parameter at `offset`, cut at its shared ranges."""
    shift, position = offset - start, start
    for shared in spec.shared:
        begin, end = max(position, shared.start), min(stop, shared.stop)
        if begin >= end:
            continue
        if position < begin:
            yield Segment(spec, position, begin, position + shift)
        yield Segment(spec, begin, end, begin + shift, shared.counted)
        position = end
    if position < stop:
        yield Segment(spec, position, stop, position + shift)


def _cut(region: Range, segments: Sequence[Segment], key: Callable[[Segment], Key]) -> Iterator[tuple[Range, Key]]:
    if not segments:
        return
    start, value = region.start, key(segments[0])
    for segment in segments:
        if key(segment) != value:
            yield Range(start, segment.offset), value
            start, value = segment.offset, key(segment)
    yield Range(start, region.stop), value


def _gap(start: int, stop: int, boundary: int) -> Iterator[Range]:
    """The elements [start, stop), cut at `boundary`."""
    if start < boundary < stop:
        yield Range(start, boundary)
        start = boundary
    if start < stop:
        yield Range(start, stop)


def _place(params: Sequence[ParamSpec], alignment: int) -> tuple[list[int], int]:
    offsets = []
    end = 0
    for param in params:
        offsets.append(next_multiple(end, alignment))
        end = offsets[-1] + _numel(param)
    return offsets, end


def _numel(param: ParamSpec) -> int:
    numel = 1
    for extent in param.shape:
        numel *= extent
    return numel
