"""Counts the zeros in the mean gradient, for --log-num-zeros-in-grad."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.comm.links import Ladder
from megatron_zpp.zero.grad_norm import counted_values
from megatron_zpp.zero.gradients import UnitGradient


def count_zeros(gradients: Sequence[UnitGradient], ladder: Ladder) -> Tensor:
    """Number of zeros in the mean gradient, without padding, [] fp64 (exact up to 2^53); every rank must call it."""
    own = torch.zeros(1, dtype=torch.float64, device=ladder.device)
    for gradient in gradients:
        segments = gradient.layout.segments(ladder.own_slice, 1)
        own += sum(segment.stop - segment.start for segment in segments if segment.counted)
        for part in counted_values(gradient.layout, gradient.primary, ladder.own_slice):
            own -= torch.count_nonzero(part)  # padding is zero and adds nothing
    return ladder.gather_world(own).sum()
