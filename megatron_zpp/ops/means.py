"""The mean over members of values that are not quantized, which descents need.

megatron_zpp.ops.reference defines the arithmetic. The kernels of csrc/means/ give the same bits, up to those of a NaN; they run if they are
loaded and support the device. They read every member once and write the mean once, however many members there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_zpp.ops import reference
from megatron_zpp.ops.checks import VALUE_DTYPES, check_dtype, check_inner_dim, check_same_device
from megatron_zpp.ops.extension import ops_for


def mean_values(members: Tensor, mean: Tensor, *, accumulate: bool) -> None:
    """Writes the mean over members to `mean` [slices, numel], or adds it.

    members: [members, slices, numel] fp32, bf16 or fp16. Members 0, 1, ... are summed in fp32 in this order, then divided by their number.
    mean: fp32, or of the dtype of `members`, to which the fp32 mean is rounded; then it is only written. The inner dim of both is
    contiguous. Raises ValueError for anything else, naming what it found and what it expected.
    """
    check_dtype("members", members, VALUE_DTYPES)
    if mean.dtype not in (torch.float32, members.dtype):
        raise ValueError(f"mean is {mean.dtype}; expected torch.float32 or {members.dtype}, as members.")
    if accumulate and mean.dtype != torch.float32:
        raise ValueError(f"mean is {mean.dtype}; expected torch.float32, because the mean is added to it.")
    if members.dim() != 3 or members.shape[0] == 0 or members.shape[1:] != mean.shape:
        raise ValueError(f"members has shape {list(members.shape)}; expected [at least one member, {', '.join(map(str, mean.shape))}].")
    check_inner_dim("members", members)
    check_inner_dim("mean", mean)
    check_same_device(members=members, mean=mean)
    ops_for(mean, reference).mean_values(members, mean, accumulate)
