"""Head and cross entropy in chunks: the logits of a micro-batch never exist whole.

T tokens, N tokens of a chunk, H hidden size, V vocabulary entries (padding included), C entries of a chunk.

Forward keeps of every token the largest logit m and the sum s of exp(logit - m). With them any part of the logits gives its part of the
softmax, exp(logit - m) / s, so backward divides the vocabulary instead of the tokens and computes the logits again. Each row of the head's
gradient is then one product over all tokens, rounded once, and only the gradient of the hidden states is a sum over chunks, in fp32.
Chunks of tokens in backward would need an fp32 sum as large as the head. The gradients cannot be made in forward, because there
the gradient of each token's loss is not known.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.model.cross_entropy import row_chunks, token_loss
from megatron_zpp.model.loss_chunks import chunk_columns, has_chunks, ranges


def head_loss(hidden: Tensor, weight_VH: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """-log softmax(hidden weight^T)[label] of every token, in fp32.

    hidden: [..., H]; weight_VH: a parameter, of the same dtype; labels: [...] int64 in 0..V-1. Returns [...] fp32.
    chunk_tokens: no more logits exist at once than so many tokens have; 0: all logits. If all tokens fit, the logits are kept for backward,
    otherwise hidden, weight and two numbers per token, and backward computes the logits again.
    """
    if not has_chunks(labels.numel(), chunk_tokens):
        return token_loss(F.linear(hidden, weight_VH), labels)
    loss_T: Tensor = _HeadLoss.apply(hidden.flatten(0, -2), weight_VH, labels.flatten(), chunk_tokens)
    return loss_T.view(labels.shape)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, chunk_tokens: int) -> Tensor:
        tokens = labels_T.shape[0]
        loss_T = torch.empty(tokens, dtype=torch.float32, device=hidden_TH.device)
        largest_T, sum_T = torch.empty_like(loss_T), torch.empty_like(loss_T)
        for chunk in ranges(tokens, chunk_tokens):
            logits_NV = F.linear(hidden_TH[chunk], weight_VH)
            for rows in row_chunks(logits_NV):
                at = slice(chunk.start + rows.start, chunk.start + rows.stop)
                largest_T[at], sum_T[at], loss_T[at] = _loss_parts(logits_NV[rows], labels_T[at])
            del logits_NV  # before the next chunk is made
        # The parameter itself: its storage is freed after forward and filled again before backward.
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, largest_T, sum_T)
        ctx.chunk_tokens = chunk_tokens
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_T: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_TH, weight_VH, labels_T, largest_T, sum_T = ctx.saved_tensors
        (tokens, _), vocabulary = hidden_TH.shape, weight_VH.shape[0]
        factor_T = grad_loss_T / sum_T
        grad_hidden_TH = torch.zeros(hidden_TH.shape, dtype=torch.float32, device=hidden_TH.device)
        grad_weight_VH = torch.empty_like(weight_VH)
        for chunk in ranges(vocabulary, chunk_columns(tokens, vocabulary, ctx.chunk_tokens)):
            logits_TC = F.linear(hidden_TH, weight_VH[chunk])
            columns_T = labels_T - chunk.start
            for rows in row_chunks(logits_TC):
                _to_gradient(logits_TC[rows], columns_T[rows], largest_T[rows], factor_T[rows], grad_loss_T[rows])
            torch.mm(logits_TC.T, hidden_TH, out=grad_weight_VH[chunk])
            _add_product(grad_hidden_TH, logits_TC, weight_VH[chunk])
            del logits_TC
        return grad_hidden_TH.to(hidden_TH.dtype), grad_weight_VH, None, None


def _loss_parts(logits_RV: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(largest logit, sum of exp(logit - largest), loss) of each row, in fp32. Overwrites fp32 logits."""
    shifted_RV = logits_RV.float()  # itself, if it is fp32
    largest_R = shifted_RV.amax(dim=-1)
    shifted_RV.sub_(largest_R[:, None])
    shifted_label_R = shifted_RV.gather(1, labels_R[:, None]).squeeze(1)
    sum_R = shifted_RV.exp_().sum(dim=-1)
    return largest_R, sum_R, sum_R.log() - shifted_label_R


def _to_gradient(logits_RC: Tensor, columns_R: Tensor, largest_R: Tensor, factor_R: Tensor, grad_loss_R: Tensor) -> None:
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


def _add_product(sum_TH: Tensor, gradient_TC: Tensor, weight_CH: Tensor) -> None:
    """Adds a matrix product to a sum in fp32; a product of 16-bit values is rounded to 16 bits before."""
    if sum_TH.dtype == weight_CH.dtype:
        torch.addmm(sum_TH, gradient_TC, weight_CH, out=sum_TH)
    else:
        sum_TH.add_(gradient_TC @ weight_CH)
