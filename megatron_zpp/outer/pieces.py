"""Cuts the state of islands into pieces of parameters, for a checkpoint of all islands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_zpp.comm.codec import Regions
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.outer.unit import OuterUnit
from megatron_zpp.zero.pieces import Piece, pieces_of
from megatron_zpp.zero.policy import WEIGHT

# States that all islands share, beside the outer weight, which is the weight of a checkpoint: the momentum of outer steps, and the outer
# copy, in the working dtype.
OUTER_MOMENTUM, OUTER_COPY = "outer_momentum", "outer_copy"


def owned_outer_pieces(outer: OuterSteps) -> Iterator[Piece]:
    """The pieces of this rank's part of outer weights, momentum and copies; those of all ranks are the whole states, each element once."""
    for unit in filter(None, outer.units):
        own = outer.island
        yield from _pieces(unit, own, {OUTER_COPY: unit.kept.own, **_own_states(unit)}, only_counted=True)


def resting_outer_pieces(outer: OuterSteps) -> Iterator[Piece]:
    """All pieces that a load fills: this rank's part of outer weights and momentum, and all parts of the copy."""
    for unit in filter(None, outer.units):
        yield from _pieces(unit, outer.island, _own_states(unit), only_counted=False)
        for part in range(outer.islands):
            yield from _pieces(unit, part, {OUTER_COPY: unit.kept.values.slice_at(part)}, only_counted=False)


def _own_states(unit: OuterUnit) -> dict[str, Regions]:
    shape = unit.layout.slice_shape
    return {WEIGHT: Regions.of(unit.weight, shape), OUTER_MOMENTUM: Regions.of(unit.momentum, shape)}


def _pieces(unit: OuterUnit, part: int, states: Mapping[str, Regions], *, only_counted: bool) -> Iterator[Piece]:
    """states: their values in this part, [1 part]."""
    inner, boundary = unit.inner, unit.inner.layout.slice_shape.blocks
    for segment in inner.layout.segments(inner.first_slice, inner.slices):
        if only_counted and not segment.counted:
            continue
        is_exact = segment.offset >= boundary
        for state, regions in states.items():
            (values,) = regions.exact if is_exact else regions.blocks
            first = segment.offset - (boundary if is_exact else 0) - part * values.numel()  # its place in the part
            start, stop = max(0, first), min(values.numel(), first + segment.stop - segment.start)
            if start < stop:
                spec = segment.spec
                yield from pieces_of(spec.name, state, spec.division, segment.start + start - first, values[start:stop])
