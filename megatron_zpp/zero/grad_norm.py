"""The global gradient norm: one fp64 partial per unit and primary slice, added in slice order on every rank and in every stage.

So the norm has the same bits wherever the gradients rest, and a NaN or inf on one rank is known to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_zpp.comm.links import Ladder
from megatron_zpp.ops.apex import apex_member
from megatron_zpp.zero.gradients import UnitGradient

_CHUNK_NUMEL = 1 << 22  # bounds the fp64 copies at 32 MB

SquaredSum = Callable[[Sequence[Tensor]], Tensor]


def global_norm(gradients: Sequence[UnitGradient], ladder: Ladder, squared_sum: SquaredSum) -> float:
    """The L2 norm of the mean gradient over all units and slices; every rank must call it.

    squared_sum: the sum of squares, fp64 [], over tensors of any shapes.
    """
    partials = torch.stack([squared_sum(list(_counted(gradient, ladder.own_slice))) for gradient in gradients])
    gathered = ladder.gather_world(partials)  # [world_size, units] fp64, in rank order
    rows = gathered.tolist()
    total = 0.0
    for rank in sorted(range(ladder.topology.world_size), key=ladder.topology.slice_of):
        for partial in rows[rank]:
            total += partial
    return math.sqrt(total) if total >= 0 else math.nan


def squared_sum_fp64(parts: Sequence[Tensor]) -> Tensor:
    """The sum of squares of `parts` in fp64; parts: at least one, each [numel]."""
    total = torch.zeros((), dtype=torch.float64, device=parts[0].device)
    for part in parts:
        for chunk in part.split(_CHUNK_NUMEL):
            values = chunk.double()
            total += torch.dot(values, values)
    return total


def squared_sum_apex(parts: Sequence[Tensor]) -> Tensor:
    """The same by the multi-tensor L2 norm of NVIDIA Apex, which adds in fp32: one kernel for all parts."""
    applier, kernel = apex_member("apex.multi_tensor_apply", "multi_tensor_applier"), apex_member("amp_C", "multi_tensor_l2norm")
    overflow = torch.zeros(1, dtype=torch.int32, device=parts[0].device)
    norm, _ = applier(kernel, overflow, [list(parts)], False)
    return norm.double().square().sum()


def _counted(gradient: UnitGradient, own_slice: int) -> Iterator[Tensor]:
    for counted_range, is_counted in gradient.layout.ranges_by(lambda segment: segment.counted, own_slice, 1):
        if is_counted:
            yield gradient.primary.range(counted_range.start, counted_range.stop)
