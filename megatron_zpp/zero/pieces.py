"""Cuts the state of an engine into pieces of parameters. Checkpoints store only these, so they depend on neither layout nor world size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_zpp.comm.codec import Regions
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.stripes import Columns, columns_of
from megatron_zpp.zero.layout import PlacedParam
from megatron_zpp.zero.policy import KEPT_WEIGHT, WEIGHT

if TYPE_CHECKING:
    from megatron_zpp.zero.engine import ZeroEngine


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of some columns of one state (`weight`, a moment or `kept_weight`) of a whole parameter.

    values: [stop - start], a view of the engine's state. columns: first and last, exclusive; None if they are all columns, so
    that the elements are those of the flattened parameter.
    """

    parameter: str
    state: str
    start: int
    stop: int
    values: Tensor
    columns: Columns | None = None


def owned_pieces(engine: ZeroEngine) -> Iterator[Piece]:
    """The pieces of this rank's primary slices. The owned pieces of all ranks together are the whole state, each element once."""
    return _pieces(engine, engine.links.own_slice, only_counted=True)


def resting_pieces(engine: ZeroEngine) -> Iterator[Piece]:
    """All pieces that a load fills: those of the primary slice, or of all slices if the optimizer is kept on the full rung."""
    return _pieces(engine, None, only_counted=False)


def parameters(engine: ZeroEngine) -> Iterator[PlacedParam]:
    """Every parameter of the model, in the order of the units."""
    for unit in engine.units:
        yield from unit.layout.params


def _pieces(engine: ZeroEngine, only_slice: int | None, *, only_counted: bool) -> Iterator[Piece]:
    engine.finish_updates()
    moments_of = dict(zip((unit.name for unit in engine.trained), engine.optimizer.moments, strict=True))
    for unit in engine.units:
        first, count = (unit.first_slice, unit.slices) if only_slice is None else (only_slice, 1)
        states = {
            state: Regions.of(flat, unit.layout.slice_shape).slices_at(first - unit.first_slice, count)
            for state, flat in {WEIGHT: unit.main_weight, **moments_of.get(unit.name, {})}.items()
        }
        if unit.kept is not None:
            states[KEPT_WEIGHT] = unit.kept.own
        for state, regions in states.items():
            for segment in unit.layout.segments(first, count):
                if segment.counted or not only_counted:
                    values = regions.range(segment.offset, segment.offset + segment.stop - segment.start)
                    yield from pieces_of(segment.spec.name, state, segment.spec.division, segment.start, values)


def pieces_of(parameter: str, state: str, division: Division, start: int, values: Tensor) -> Iterator[Piece]:
    """The pieces of consecutive elements of a rank's part, one for each stripe of the whole parameter.

    start: of the first element in the flattened part. values: of the elements.
    """
    for placed in division.stripes(start, start + values.numel()):
        stripe, first = placed.stripe, placed.offset - start
        columns = None if stripe.columns == columns_of(division.shape) else stripe.columns
        yield Piece(parameter, state, stripe.start, stripe.stop, values[first : first + stripe.numel], columns)
