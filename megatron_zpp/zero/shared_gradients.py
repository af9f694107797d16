"""Makes the gradients of elements that several tensor ranks hold equal, once per step, on the slices that the optimizer reads.

Backward leaves on each holder of an element the whole gradient or a part of it (parallel/division.py:Gradient). After the last descent of
a step, one gather over the tensor link brings every rank the shared elements of all others. Each holder then takes

    partial    the sum over the holders, in fp32 and in the order of their ranks
    whole      what the first holder has

So all holders have the same bits, whatever codes their ladders got on the way, and their main weights and moments stay equal for ever. Sum
and mean over data ranks commute. On the primary rung a rank handles 1/D of the shared elements, once per step instead of per micro-batch.

With an optimizer on the full rung this happens after the mean has climbed back, for the shared elements of all slices. On the own slice
alone the climbs would have to wait for the last descent of all units, instead of running beside backward; the bits would be the same.

All tensor ranks have parts of the same shapes, so the same slice has its shared elements at the same places on every ladder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_zpp.comm.code import SliceShape
from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.links import Links
from megatron_zpp.parallel.division import Division, Gradient, SharedRange
from megatron_zpp.parallel.specs import ParamSpec
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.layout import FlatLayout, Segment

_FP32_BYTES = 4


@dataclass(frozen=True)
class _Columns:
    """Columns [start, stop) of what is gathered. addends: the holders whose values are added up, in order."""

    start: int
    stop: int
    addends: tuple[int, ...]
    numels: tuple[int, ...]  # of the places that take the sums, one after the other


class SharedGradients:
    """The shared elements in the gradients that this rank's optimizer reads."""

    def __init__(self, gradients: Sequence[UnitGradient], links: Links, first_slice: int, slices: int) -> None:
        """first_slice, slices: those of `for_optimizer` in each gradient. Raises RuntimeError as `shared_places` does."""
        self._link = links.tensor_link
        self._views: list[Tensor] = []
        self._columns: list[_Columns] = []
        start = 0
        layouts = [gradient.layout for gradient in gradients]
        for sharing, places in shared_places(layouts, first_slice, slices, links.grid.tensor_ranks).items():
            holders = sharing.holders[links.tensor_rank]
            numels = tuple(place.numel for place in places)
            addends = holders if sharing.gradient is Gradient.PARTIAL else holders[:1]
            self._columns.append(_Columns(start, start + sum(numels), addends, numels))
            self._views += [gradients[place.unit].for_optimizer.range(place.start, place.stop) for place in places]
            start += sum(numels)

    def combine(self) -> None:
        """Makes them equal on all holders. Every rank must call it, once per step: twice, sums would be too large.

        The host does not wait for a device.
        """
        if self._link is None or not self._views:
            return  # alike on all ranks of the link, which have the same slice
        gathered = self._link.gather(torch.cat(self._views), Category.REPLICAS)
        totals: list[Tensor] = []
        for columns in self._columns:
            first, *others = (gathered[rank, columns.start : columns.stop] for rank in columns.addends)
            for other in others:
                first += other
            totals += first.split(columns.numels)
        torch._foreach_copy_(self._views, totals)


@dataclass(frozen=True)
class Sharing:
    """How tensor ranks hold some elements. holders: by tensor rank, those that have the same elements as it. gradient: on each of them."""

    holders: tuple[tuple[int, ...], ...]
    gradient: Gradient


@dataclass(frozen=True)
class SharedPlace:
    """Shared elements [start, stop) of the flat buffer of some slices of unit number `unit`."""

    unit: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


def shared_places(layouts: Sequence[FlatLayout], first: int, slices: int, tensor_ranks: int) -> dict[Sharing, list[SharedPlace]]:
    """The shared elements in `slices` slices from `first` on of all units, in the same order on all tensor ranks.

    Raises RuntimeError if the tensor ranks have shared elements at different places, or parts for another number of tensor ranks.
    """
    sharings: dict[Division, list[Sharing]] = {}  # blocks have equal ones
    places: dict[Sharing, list[SharedPlace]] = {}
    for unit, layout in enumerate(layouts):
        for param in layout.params:
            if param.spec.division not in sharings:
                sharings[param.spec.division] = _sharings(param.spec, tensor_ranks)
        for segment in layout.segments(first, slices):
            index = _shared_index(segment)
            if index is not None:
                place = SharedPlace(unit, segment.offset, segment.offset + segment.stop - segment.start)
                places.setdefault(sharings[segment.spec.division][index], []).append(place)
    return places


def most_shared_numel(layouts: Sequence[FlatLayout], slices: int) -> int:
    """The most shared elements that a rank may have in `slices` slices of all units; those that it has in all slices."""
    return sum(min(shared, slices * numel) for layout in layouts for shared, numel in _by_region(layout))


def sharing_received_bytes(numel: int, tensor_ranks: int) -> int:
    """Bytes that a rank receives once per step over the tensor link to make `numel` shared elements equal."""
    return (tensor_ranks - 1) * _FP32_BYTES * numel


def _by_region(layout: FlatLayout) -> Iterator[tuple[int, int]]:
    """The shared elements of the blocks and of the exact region, each with the elements that a slice has of it."""
    shape: SliceShape = layout.slice_shape
    for numel, is_exact in ((shape.blocks, False), (shape.exact, True)):
        params = [param.spec for param in layout.params if (len(param.spec.shape) <= 1) == is_exact]
        yield sum(shared.stop - shared.start for spec in params for shared in spec.shared), numel


def _shared_index(segment: Segment) -> int | None:
    """Which of the parameter's shared ranges the segment is in; segments are cut where these begin and end."""
    inside = (index for index, shared in enumerate(segment.spec.shared) if shared.start <= segment.start < shared.stop)
    return next(inside, None)


def _sharings(spec: ParamSpec, tensor_ranks: int) -> list[Sharing]:
    """How each of the parameter's shared ranges is held."""
    holders = {holder for held in spec.division.ranges for holder in held.holders}
    if holders and holders != set(range(tensor_ranks)):
        raise RuntimeError(f"parameter {spec.name}: it is divided over tensor ranks {sorted(holders)}, and there are {tensor_ranks}")
    parts = [replace(spec.division, rank=rank) for rank in range(tensor_ranks)]
    ranges = [list(part.shared()) for part in parts]
    if len({tuple((shared.start, shared.stop, shared.gradient) for shared in of_rank) for of_rank in ranges}) > 1:
        raise RuntimeError(f"parameter {spec.name}: the tensor ranks have shared elements at different places of their parts")
    for of_rank in ranges:
        for shared in of_rank:
            _check_equal(spec, shared, parts)
    return [Sharing(tuple(shared.holders for shared in of_ranks), of_ranks[0].gradient) for of_ranks in zip(*ranges, strict=True)]


def _check_equal(spec: ParamSpec, shared: SharedRange, parts: Sequence[Division]) -> None:
    """Raises RuntimeError unless the holders of a shared range have the same elements in it."""
    elements = {tuple(placed.stripe for placed in parts[holder].stripes(shared.start, shared.stop)) for holder in shared.holders}
    if len(elements) > 1:
        raise RuntimeError(
            f"parameter {spec.name}: elements {shared.start} to {shared.stop} of the parts are not the same on tensor ranks "
            f"{shared.holders}"
        )
