"""The softmax of logits, and its gradient, of any part of the tokens and of the vocabulary; fp32 copies exist for a few tokens at a time.

T tokens, R of them, V vocabulary entries of the logits, C columns: some of the entries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_zpp.model.loss_chunks import ranges
from megatron_zpp.tensor_parallel.cross_entropy import LogitParts, combined
from megatron_zpp.tensor_parallel.vocabulary import DividedRows

# fp32 values that exist at once beside logits and their gradient: 64 MiB. Enough to keep a device busy, and little beside all logits.
CHUNK_NUMEL = 1 << 24


def row_chunks(logits_TV: Tensor) -> Iterator[slice]:
    """Slices of rows with CHUNK_NUMEL values or fewer, but of at least one row."""
    tokens, vocabulary = logits_TV.shape
    return ranges(tokens, max(1, CHUNK_NUMEL // vocabulary))


def softmax_parts(logits_TV: Tensor, labels_T: Tensor, divided: DividedRows | None, *, overwrites: bool) -> LogitParts:
    """Of each token: largest logit, sum of exp(logit - largest), and the label's logit, of the whole vocabulary.

    divided: the vocabulary entries that the logits have if tensor ranks share them; then the ranks exchange their parts, once.
    overwrites: whether fp32 logits may be overwritten.
    """
    places_T, is_own_T = (labels_T, None) if divided is None else divided.found(labels_T)
    parts = LogitParts(*(torch.empty(labels_T.shape, dtype=torch.float32, device=logits_TV.device) for _ in LogitParts._fields))
    for rows in row_chunks(logits_TV):
        wide_RV = logits_TV[rows].float()  # itself, if it is fp32
        parts.label_R[rows] = wide_RV.gather(1, places_T[rows, None]).squeeze(1)
        parts.largest_R[rows] = largest_R = wide_RV.amax(dim=-1)
        is_scratch = overwrites or wide_RV.dtype != logits_TV.dtype
        shifted_RV = torch.sub(wide_RV, largest_R[:, None], out=wide_RV if is_scratch else None)
        parts.sum_R[rows] = shifted_RV.exp_().sum(dim=-1)
    if divided is None or is_own_T is None:
        return parts
    return combined(parts._replace(label_R=parts.label_R.masked_fill_(~is_own_T, 0.0)), divided.link)


def to_gradient(logits_RC: Tensor, columns_R: Tensor, largest_R: Tensor, factor_R: Tensor, grad_loss_R: Tensor) -> None:
    """Overwrites logits with the gradient for them, rounded once.

    columns_R: of each row's label; the label of a row is elsewhere if its column is not one of these. factor_R: gradient of the row's loss
    divided by the row's sum of exponentials.
    """
    gradient_RC = logits_RC.float()  # itself, if it is fp32
    gradient_RC.sub_(largest_R[:, None]).exp_().mul_(factor_R[:, None])
    rows, columns = gradient_RC.shape
    is_here_R = (columns_R >= 0) & (columns_R < columns)
    row_R = torch.arange(rows, device=gradient_RC.device)
    gradient_RC[row_R, columns_R.clamp(0, columns - 1)] -= torch.where(is_here_R, grad_loss_R, 0.0)
    if gradient_RC.dtype != logits_RC.dtype:
        logits_RC.copy_(gradient_RC)
