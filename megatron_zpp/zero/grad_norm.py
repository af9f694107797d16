"""Norms over all ranks. Each primary slice of a unit has one fp64 partial sum on each ladder.

Every rank adds these sums in the order of the slices, and those of one slice in the order of the ladders. So the norm of equal values has
the same bits in every stage, and a NaN or inf on one rank reaches all ranks. The device does all of this; the host need not wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.links import Ladder
from megatron_zpp.ops.device_kind import kind_of
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.squared_sums import SquaredSums
from megatron_zpp.zero.unit import WeightUnit


def squared_norm(gradients: Sequence[UnitGradient], ladder: Ladder, squared_sums: SquaredSums, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The square of the L2 norm of the mean gradient over all units and slices, [] fp64; every rank must call it.

    numbers: [numel] fp64, which the ranks exchange in the same message. Also returns those of every rank, [world_size, numel].
    """
    return _squared_norm([(gradient.layout, gradient.primary) for gradient in gradients], ladder, squared_sums, numbers)


def weight_norm(units: Sequence[WeightUnit], ladder: Ladder, squared_sums: SquaredSums) -> float:
    """The L2 norm of the main weights over all units and slices; every rank must call it, and waits."""
    own = [(unit.layout, unit.main_regions().slice_at(ladder.own_slice - unit.first_slice)) for unit in units]
    squared, _ = _squared_norm(own, ladder, squared_sums)
    return math.sqrt(squared.item())


def _squared_norm(
    units: Sequence[tuple[FlatLayout, Regions]], ladder: Ladder, squared_sums: SquaredSums, numbers: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """units: for each unit its layout, and its values in this rank's own slice."""
    parts = [list(counted_values(layout, own, ladder.own_slice)) for layout, own in units]
    sums = squared_sums(parts, units[0][1].blocks.device).to(ladder.device)
    gathered = ladder.gather_world(sums if numbers is None else torch.cat((sums, numbers)))  # [data, tensor, units + numbers] fp64
    by_slice = gathered[..., : len(units)].unflatten(0, (ladder.partitions, ladder.partition_ranks)).transpose(0, 1)
    return _sum_in_order(by_slice.flatten()), gathered[..., len(units) :].flatten(0, 1)


def _sum_in_order(values: Tensor) -> Tensor:
    """The sum of [numel] fp64: one after the other on a CPU; a GPU adds in an order of its own, always the same."""
    return values.sum() if kind_of(values.device.type) == "cuda" else values.cumsum(0)[-1]


def counted_values(layout: FlatLayout, own: Regions, own_slice: int) -> Iterator[Tensor]:
    """The values of the own slice that count in a norm."""
    for counted_range, is_counted in layout.ranges_by(lambda segment: segment.counted, own_slice, 1):
        if is_counted:
            yield own.range(counted_range.start, counted_range.stop)
