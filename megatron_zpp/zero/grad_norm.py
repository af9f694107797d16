"""Norms over all ranks. Each primary slice of a unit has one fp64 partial sum on each ladder.

Every rank adds these sums in the order of the slices, and those of one slice in the order of the ladders. So the norm of equal values has
the same bits in every stage, and a NaN or inf on one rank reaches all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.links import Ladder
from megatron_zpp.ops.apex import apex_member
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.unit import WeightUnit

_CHUNK_NUMEL = 1 << 22  # fp64 copies are made of one chunk at a time: 32 MiB

SquaredSum = Callable[[Sequence[Tensor]], Tensor]


def global_norm(gradients: Sequence[UnitGradient], ladder: Ladder, squared_sum: SquaredSum) -> float:
    """The L2 norm of the mean gradient over all units and slices; every rank must call it.

    squared_sum: adds the squares of all elements of the tensors that it is given; returns fp64 [].
    """
    return _norm([(gradient.layout, gradient.primary) for gradient in gradients], ladder, squared_sum)


def weight_norm(units: Sequence[WeightUnit], ladder: Ladder, squared_sum: SquaredSum) -> float:
    """The L2 norm of the main weights over all units and slices; every rank must call it."""
    own = [(unit.layout, unit.main_regions().slice_at(ladder.own_slice - unit.first_slice)) for unit in units]
    return _norm(own, ladder, squared_sum)


def count_zeros(gradients: Sequence[UnitGradient], ladder: Ladder) -> int:
    """Number of zeros in the mean gradient, without padding; every rank must call it."""
    own = torch.zeros((), dtype=torch.float64, device=gradients[0].total.device)  # exact up to 2^53
    for gradient in gradients:
        segments = gradient.layout.segments(ladder.own_slice, 1)
        own += sum(segment.stop - segment.start for segment in segments if segment.counted)
        for part in _counted(gradient.layout, gradient.primary, ladder.own_slice):
            own -= torch.count_nonzero(part)  # padding is zero and adds nothing
    return int(ladder.gather_world(own.view(1)).sum().item())


def _norm(units: Sequence[tuple[FlatLayout, Regions]], ladder: Ladder, squared_sum: SquaredSum) -> float:
    """units: for each unit its layout, and its values in this rank's own slice."""
    partials = [_partial(layout, own, ladder.own_slice, squared_sum) for layout, own in units]
    gathered = ladder.gather_world(torch.stack(partials)).tolist()  # [data ranks, tensor ranks, units] fp64
    total = 0.0
    for data_rank in sorted(range(ladder.topology.data_ranks), key=ladder.topology.slice_of):
        for row in gathered[data_rank]:
            for partial in row:
                total += partial
    return math.sqrt(total) if total >= 0 else math.nan


def _partial(layout: FlatLayout, own: Regions, own_slice: int, squared_sum: SquaredSum) -> Tensor:
    """fp64 []: 0 where other ladders count all elements."""
    parts = list(_counted(layout, own, own_slice))
    return squared_sum(parts) if parts else own.blocks.new_zeros((), dtype=torch.float64)


def squared_sum_fp64(parts: Sequence[Tensor]) -> Tensor:
    """The sum of squares of `parts` in fp64; parts: at least one, each [numel]."""
    total = torch.zeros((), dtype=torch.float64, device=parts[0].device)
    for part in parts:
        for chunk in part.split(_CHUNK_NUMEL):
            values = chunk.double()
            total += torch.dot(values, values)
    return total


def squared_sum_apex(parts: Sequence[Tensor]) -> Tensor:
    """The same sum from NVIDIA Apex's multi-tensor L2 norm: one kernel for all parts, which adds in fp32."""
    applier, kernel = apex_member("apex.multi_tensor_apply", "multi_tensor_applier"), apex_member("amp_C", "multi_tensor_l2norm")
    overflow = torch.zeros(1, dtype=torch.int32, device=parts[0].device)
    norm, _ = applier(kernel, overflow, [list(parts)], False)
    return norm.double().square().sum()


def _counted(layout: FlatLayout, own: Regions, own_slice: int) -> Iterator[Tensor]:
    """The values of the own slice that count in a norm."""
    for counted_range, is_counted in layout.ranges_by(lambda segment: segment.counted, own_slice, 1):
        if is_counted:
            yield own.range(counted_range.start, counted_range.stop)
