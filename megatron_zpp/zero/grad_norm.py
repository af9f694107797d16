"""The global gradient norm: one fp64 partial per unit and primary slice, added in slice order on every rank and in every stage.

So the norm has the same bits wherever the gradients rest, and a NaN or inf on one rank is known to all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.comm.links import Ladder
from megatron_zpp.zero.gradients import UnitGradient

_CHUNK_NUMEL = 1 << 22  # bounds the fp64 copies at 32 MB


def global_norm(gradients: Sequence[UnitGradient], ladder: Ladder) -> float:
    """The L2 norm of the mean gradient over all units and slices; every rank must call it."""
    partials = torch.stack([_squared_norm(gradient, ladder.own_slice) for gradient in gradients])
    gathered = ladder.gather_world(partials)  # [world_size, units] fp64, in rank order
    rows = gathered.tolist()
    total = 0.0
    for rank in sorted(range(ladder.topology.world_size), key=ladder.topology.slice_of):
        for partial in rows[rank]:
            total += partial
    return math.sqrt(total) if total >= 0 else math.nan


def _squared_norm(gradient: UnitGradient, own_slice: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=gradient.total.device)
    for counted_range, is_counted in gradient.layout.ranges_by(lambda segment: segment.counted, own_slice, 1):
        if is_counted:
            for chunk in gradient.primary.range(counted_range.start, counted_range.stop).split(_CHUNK_NUMEL):
                values = chunk.double()
                total += torch.dot(values, values)
    return total
