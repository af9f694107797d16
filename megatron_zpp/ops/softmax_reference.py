"""The softmax of logits and its gradient in plain torch: the path on CPUs, and on GPUs without kernels.

Rows are widened to fp32 a few at a time. The kernels of csrc/softmax/ agree within rounding, because they add up in another order.
megatron_zpp.ops.softmax has checked the arguments. T tokens, R of them, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# fp32 values that exist at once beside logits and their gradient: 64 MiB. Enough to keep a device busy, and little beside all logits.
CHUNK_NUMEL = 1 << 24


def row_chunks(logits_TC: Tensor) -> Iterator[slice]:
    """Slices of rows with CHUNK_NUMEL values or fewer, but of at least one row."""
    tokens, columns = logits_TC.shape
    step = max(1, CHUNK_NUMEL // columns)
    return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))


def softmax_parts(
    logits_TC: Tensor, labels_T: Tensor, first: int, entries: int, largest_T: Tensor, sums_T: Tensor, label_T: Tensor, *, overwrites: bool
) -> None:
    """overwrites: whether fp32 logits may be overwritten."""
    columns_T = labels_T - first
    is_known_T = (labels_T >= 0) & (labels_T < entries)
    is_here_T = _is_here(columns_T, logits_TC)
    # A label that is in no part stays as it is, where looking it up is an error.
    places_T = torch.where(is_known_T, columns_T.clamp(0, logits_TC.shape[1] - 1), labels_T)
    for rows in row_chunks(logits_TC):
        wide_RC = logits_TC[rows].float()  # itself, if it is fp32
        label_T[rows] = wide_RC.gather(1, places_T[rows, None]).squeeze(1).masked_fill_(~is_here_T[rows], 0.0)
        largest_T[rows] = largest_R = wide_RC.amax(dim=-1)
        origin_R = largest_R.masked_fill(largest_R == -torch.inf, 0.0)  # -inf minus -inf would be NaN
        is_scratch = overwrites or wide_RC.dtype != logits_TC.dtype
        shifted_RC = torch.sub(wide_RC, origin_R[:, None], out=wide_RC if is_scratch else None)
        sums_T[rows] = shifted_RC.exp_().sum(dim=-1)


def softmax_gradient(
    logits_TC: Tensor, labels_T: Tensor, first: int, largest_T: Tensor, sums_T: Tensor, grad_loss_T: Tensor, gradient_TC: Tensor
) -> None:
    columns_T, factor_T = labels_T - first, grad_loss_T / sums_T
    is_here_T = _is_here(columns_T, logits_TC)
    columns_T.clamp_(0, logits_TC.shape[1] - 1)
    for rows in row_chunks(logits_TC):
        target_RC, source_RC = gradient_TC[rows], logits_TC[rows].float()
        wide_RC = target_RC if target_RC.dtype == torch.float32 else source_RC
        torch.sub(source_RC, largest_T[rows, None], out=wide_RC).exp_().mul_(factor_T[rows, None])
        row_R = torch.arange(len(wide_RC), device=wide_RC.device)
        wide_RC[row_R, columns_T[rows]] -= torch.where(is_here_T[rows], grad_loss_T[rows], 0.0)
        if wide_RC is not target_RC:
            target_RC.copy_(wide_RC)


def _is_here(columns_T: Tensor, logits_TC: Tensor) -> Tensor:
    return (columns_T >= 0) & (columns_T < logits_TC.shape[1])
