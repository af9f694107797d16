"""Cuts the state of an engine into pieces of parameters. Checkpoints store only these, so they depend on neither layout nor world size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_zpp.comm.codecs import Regions
from megatron_zpp.zero.layout import PlacedParam

if TYPE_CHECKING:
    from megatron_zpp.zero.engine import ZeroEngine

WEIGHT = "weight"


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of one state (`weight` or a moment) of one flattened parameter.

    values: [stop - start] fp32, a view of the engine's state.
    """

    parameter: str
    state: str
    start: int
    stop: int
    values: Tensor


def owned_pieces(engine: ZeroEngine) -> Iterator[Piece]:
    """The pieces of this rank's primary slices. The owned pieces of all ranks together are the whole state, each element once."""
    return _pieces(engine, engine.ladder.own_slice)


def resting_pieces(engine: ZeroEngine) -> Iterator[Piece]:
    """All pieces that this rank's optimizer updates: the owned ones, or the whole state if the optimizer is kept on the full rung."""
    return _pieces(engine, None)


def parameters(engine: ZeroEngine) -> Iterator[PlacedParam]:
    """Every parameter of the model, in the order of the units."""
    for unit in engine.units:
        yield from unit.layout.params


def _pieces(engine: ZeroEngine, only_slice: int | None) -> Iterator[Piece]:
    for unit, moments in zip(engine.units, engine.optimizer.moments, strict=True):
        first, count = (unit.first_slice, unit.slices) if only_slice is None else (only_slice, 1)
        for state, flat in {WEIGHT: unit.main_weight, **moments}.items():
            regions = Regions.of(flat, unit.layout.runs)
            if count < regions.slices:
                regions = regions.slice_at(first - unit.first_slice)
            for segment in unit.layout.segments(first, count):
                values = regions.range(segment.offset, segment.offset + segment.stop - segment.start)
                yield Piece(segment.spec.name, state, segment.start, segment.stop, values)
