"""How a parameter is divided over the tensor ranks of a group: what each of them holds, as stripes of the whole (no torch).

Every parameter is seen as a matrix: one of one dim has one column, one of more than two dims has a row for each index of its first dim,
and one of no dims is a single element. It is divided by rows, or by columns if it has two dims. Each tensor rank holds one or more ranges
of them, one after the other. A range may have several holders, such as the keys of a group of queries that is spread over two ranks. The
parameter [6, 2], its rows in ranges of which two ranks hold the last:

    rows 0 1    holders 0        rank 0 has rows 0 1 4 5
    rows 2 3    holders 1        rank 1 has rows 2 3 4 5
    rows 4 5    holders 0 1
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_zpp.system.user_error import UserError


class Gradient(enum.Enum):
    """What backward leaves on one holder of elements that several ranks hold: the whole gradient, or a part of its sum."""

    WHOLE = "whole"
    PARTIAL = "partial"


@dataclass(frozen=True)
class HeldRange:
    """Rows, columns or elements [start, stop) of a whole parameter, and the tensor ranks that hold them, ascending."""

    start: int
    stop: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Stripe:
    """Elements [start, stop) of some columns of a whole parameter: of the matrix [rows, columns[1] - columns[0]], row after row."""

    columns: tuple[int, int]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class PlacedStripe:
    """A stripe, and where its first element is in the flattened part of a rank."""

    offset: int
    stripe: Stripe


@dataclass(frozen=True)
class SharedRange:
    """Elements [start, stop) of the flattened part of a rank that all of `holders` have. counted: whether the rank is the first of them."""

    start: int
    stop: int
    holders: tuple[int, ...]
    counted: bool
    gradient: Gradient


@dataclass(frozen=True)
class Division:
    """The part of tensor rank `rank` in a parameter of shape `shape`.

    dim: 0 if `ranges` are rows or elements, 1 if they are columns; only a parameter of two dims is divided by columns. gradient: on each
    holder of a range that has several.
    Raises UserError unless the ranges cover the dim from its start to its end, each has a holder, and the rank holds a range; a rank holds
    at most one range of columns.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[HeldRange, ...]
    rank: int
    gradient: Gradient = Gradient.WHOLE

    def __post_init__(self) -> None:
        if self.dim not in (0, 1) or (self.dim == 1 and len(self.shape) != 2):
            raise UserError(f"a parameter of shape {self.shape} cannot be divided along dim {self.dim}")
        extent = (_rows(self.shape), self.width)[self.dim]
        position = 0
        for held in self.ranges:
            if held.start != position or held.stop <= held.start or not held.holders or list(held.holders) != sorted(set(held.holders)):
                raise UserError(f"{held} does not continue the ranges of dim {self.dim} of {self.shape} at {position}")
            position = held.stop
        if position != extent:
            raise UserError(f"the ranges of dim {self.dim} of {self.shape} end at {position}")
        if len(self._own) != 1 and (self.dim == 1 or (extent > 0 and not self._own)):
            raise UserError(f"tensor rank {self.rank} holds {len(self._own)} ranges of dim {self.dim} of {self.shape}")

    @classmethod
    def undivided(cls, shape: tuple[int, ...], ranks: int = 1, rank: int = 0, gradient: Gradient = Gradient.WHOLE) -> Division:
        """A parameter that each of `ranks` ranks has as a whole."""
        rows = _rows(shape)
        return cls(shape, 0, (HeldRange(0, rows, tuple(range(ranks))),) if rows else (), rank, gradient)

    @classmethod
    def evenly(cls, shape: tuple[int, ...], dim: int, ranks: int, rank: int) -> Division:
        """A parameter that is cut along `dim` into one part per rank. Raises UserError if `ranks` does not divide the dim."""
        if shape[dim] % ranks:
            raise UserError(f"{ranks} tensor ranks do not divide dim {dim} of {shape}")
        length = shape[dim] // ranks
        return cls(shape, dim, tuple(HeldRange(part * length, (part + 1) * length, (part,)) for part in range(ranks)), rank)

    @cached_property
    def _own(self) -> tuple[HeldRange, ...]:
        return tuple(held for held in self.ranges if self.rank in held.holders)

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """The number of columns of the whole, seen as a matrix."""
        return math.prod(self.shape[1:])

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the rank's part."""
        if not self.shape:
            return ()
        length = sum(held.stop - held.start for held in self._own)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def stripes(self, start: int, stop: int) -> Iterator[PlacedStripe]:
        """The stripes of elements [start, stop) of the flattened part, in order; neighbouring ranges are one stripe."""
        if self.dim == 1:
            (held,) = self._own
            if start < stop:
                yield PlacedStripe(start, Stripe((held.start, held.stop), start, stop))
            return
        width = self.width
        pending: PlacedStripe | None = None
        for offset, held in self._placed():
            begin, end = max(start, offset), min(stop, offset + (held.stop - held.start) * width)
            if begin >= end:
                continue
            shift = held.start * width - offset
            if pending is not None and pending.stripe.stop == begin + shift:
                pending = PlacedStripe(pending.offset, Stripe((0, width), pending.stripe.start, end + shift))
                continue
            if pending is not None:
                yield pending
            pending = PlacedStripe(begin, Stripe((0, width), begin + shift, end + shift))
        if pending is not None:
            yield pending

    def shared(self) -> Iterator[SharedRange]:
        """The ranges of the flattened part that other ranks hold, too, in order."""
        if self.dim == 1:
            (held,) = self._own
            if len(held.holders) > 1:
                yield self._shared_range(0, math.prod(self.local_shape), held)
            return
        for offset, held in self._placed():
            if len(held.holders) > 1 and self.width > 0:
                yield self._shared_range(offset, offset + (held.stop - held.start) * self.width, held)

    def _shared_range(self, start: int, stop: int, held: HeldRange) -> SharedRange:
        return SharedRange(start, stop, held.holders, self.rank == held.holders[0], self.gradient)

    def _placed(self) -> Iterator[tuple[int, HeldRange]]:
        """The rank's ranges of rows, each with the offset of its first element in the flattened part."""
        offset = 0
        for held in self._own:
            yield offset, held
            offset += (held.stop - held.start) * self.width


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1
