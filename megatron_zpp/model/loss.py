"""Cross entropy in fp32, of logits that exist whole, or of a head and its logits in chunks.

T tokens, N tokens of a chunk, H hidden size, V vocabulary entries (padding included; this rank's, if tensor ranks share them), C entries of
a chunk.

A rank with whole logits and no kernels of the loss keeps the logits alone for backward (token_loss). Otherwise forward computes of every
token the largest logit m, the sum s of exp(logit - m), and the label's logit, and keeps m and s. If tensor ranks share the vocabulary, they
tell each other these three numbers, once per chunk of forward; backward exchanges nothing.

In chunks the logits of a micro-batch never exist whole. With m and s any part of the logits gives its part of the softmax, exp(logit - m)
/ s, so backward divides the vocabulary instead of the tokens and computes the logits again. Each row of the head's gradient is then one
product over all tokens, rounded once, and only the gradient of the hidden states is a sum over chunks, in fp32. Chunks of tokens in
backward would need an fp32 sum as large as the head. The gradients cannot be made in forward, because there the gradient of each token's
loss is not known.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.model.loss_chunks import chunk_columns, has_chunks, ranges
from megatron_zpp.ops.extension import has_loss_kernels_for
from megatron_zpp.ops.softmax import Columns, LogitParts, TokenTerms, softmax_gradient, softmax_parts
from megatron_zpp.ops.softmax_reference import row_chunks
from megatron_zpp.tensor_parallel.vocabulary import DividedRows


def head_loss(hidden: Tensor, weight_VH: Tensor, labels: Tensor, chunk_tokens: int, divided: DividedRows | None = None) -> Tensor:
    """-log softmax(hidden weight^T)[label] of every token, in fp32.

    hidden: [..., H]; weight_VH: a parameter, of the same dtype; labels: [...] int64 in 0..V-1. Returns [...] fp32.
    chunk_tokens: no more logits exist at once than so many tokens have; 0: all logits. If all tokens fit, the logits are kept for backward,
    otherwise hidden, weight and two numbers per token, and backward computes the logits again.
    divided: the rows that weight_VH has if tensor ranks share the vocabulary; labels are of the whole. Then the gradient of `hidden` is the
    rank's part of a sum over the ranks.
    """
    if not has_chunks(labels.numel(), chunk_tokens):
        logits = F.linear(hidden, weight_VH)
        keeps_logits_alone = divided is None and not has_loss_kernels_for(logits.device.type)
        return token_loss(logits, labels) if keeps_logits_alone else softmax_loss(logits, labels, divided)
    loss_T: Tensor = _HeadLoss.apply(hidden.flatten(0, -2), weight_VH, labels.flatten(), chunk_tokens, divided)
    return loss_T.view(labels.shape)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, chunk_tokens: int, divided: DividedRows | None) -> Tensor:
        tokens = labels_T.shape[0]
        loss_T = torch.empty(tokens, dtype=torch.float32, device=hidden_TH.device)
        largest_T, sums_T = torch.empty_like(loss_T), torch.empty_like(loss_T)
        for chunk in ranges(tokens, chunk_tokens):
            parts = whole_parts(F.linear(hidden_TH[chunk], weight_VH), labels_T[chunk], divided, overwrites=True)
            largest_T[chunk], sums_T[chunk], loss_T[chunk] = parts.largest_T, parts.sums_T, parts.loss_T()
        # The parameter itself: its storage is freed after forward and filled again before backward.
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, largest_T, sums_T)
        ctx.chunk_tokens, ctx.divided = chunk_tokens, divided
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_T: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_TH, weight_VH, labels_T, largest_T, sums_T = ctx.saved_tensors
        (tokens, _), vocabulary = hidden_TH.shape, weight_VH.shape[0]
        terms = TokenTerms(labels_T, largest_T, sums_T, grad_loss_T)
        grad_hidden_TH = torch.zeros(hidden_TH.shape, dtype=torch.float32, device=hidden_TH.device)
        grad_weight_VH = torch.empty_like(weight_VH)
        for chunk in ranges(vocabulary, chunk_columns(tokens, vocabulary, ctx.chunk_tokens)):
            logits_TC = F.linear(hidden_TH, weight_VH[chunk])
            softmax_gradient(logits_TC, first_entry(ctx.divided) + chunk.start, terms, logits_TC)
            torch.mm(logits_TC.T, hidden_TH, out=grad_weight_VH[chunk])
            _add_product(grad_hidden_TH, logits_TC, weight_VH[chunk])
            del logits_TC
        return grad_hidden_TH.to(hidden_TH.dtype), grad_weight_VH, None, None, None


def _add_product(sum_TH: Tensor, gradient_TC: Tensor, weight_CH: Tensor) -> None:
    """Adds a matrix product to a sum in fp32; a product of 16-bit values is rounded to 16 bits before."""
    if sum_TH.dtype == weight_CH.dtype:
        torch.addmm(sum_TH, gradient_TC, weight_CH, out=sum_TH)
    else:
        sum_TH.add_(gradient_TC @ weight_CH)


def softmax_loss(logits: Tensor, labels: Tensor, divided: DividedRows | None) -> Tensor:
    """-log softmax(logits of all ranks)[label] of every token, in fp32, with the same bits on every rank.

    It keeps the logits and two numbers per token for backward: for logits that tensor ranks share, and for kernels of the loss.
    logits: [..., V] fp32, bf16 or fp16, the entries that `divided` says, or all; labels: [...] int64, of the whole vocabulary. Returns
    [...] fp32; the gradient is that of the rank's logits, in their dtype. Backward exchanges nothing.
    """
    loss_T: Tensor = _SoftmaxLoss.apply(logits.flatten(0, -2), labels.flatten(), divided)
    return loss_T.view(labels.shape)


class _SoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, divided: DividedRows | None) -> Tensor:
        parts = whole_parts(logits_TV, labels_T, divided, overwrites=False)
        ctx.save_for_backward(logits_TV, labels_T, parts.largest_T, parts.sums_T)
        ctx.first = first_entry(divided)
        return parts.loss_T()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_T: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, labels_T, largest_T, sums_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        softmax_gradient(logits_TV, ctx.first, TokenTerms(labels_T, largest_T, sums_T, grad_loss_T), grad_TV)
        return grad_TV, None, None


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)[label] of every token, in fp32.

    logits: [..., V] fp32, bf16 or fp16; labels: [...] int64 in 0..V-1. Returns [...] fp32; the gradient has the dtype of the logits.
    Only the logits are kept for backward, in their own dtype; fp32 copies exist for one chunk of tokens at a time.
    """
    loss_T: Tensor = _TokenLoss.apply(logits.flatten(0, -2), labels.flatten())
    return loss_T.view(labels.shape)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        ctx.save_for_backward(logits_TV, labels_T)
        loss_T = torch.empty(labels_T.shape, dtype=torch.float32, device=logits_TV.device)
        for rows in row_chunks(logits_TV):
            log_probabilities = torch.log_softmax(logits_TV[rows], dim=-1, dtype=torch.float32)
            loss_T[rows] = log_probabilities.gather(1, labels_T[rows, None]).squeeze(1).neg_()
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_T: Tensor) -> tuple[Tensor, None]:
        logits_TV, labels_T = ctx.saved_tensors
        grad_logits_TV = torch.empty_like(logits_TV)
        for rows in row_chunks(logits_TV):
            grad = torch.softmax(logits_TV[rows], dim=-1, dtype=torch.float32)
            grad[torch.arange(grad.shape[0], device=grad.device), labels_T[rows]] -= 1.0
            grad_logits_TV[rows] = grad.mul_(grad_loss_T[rows, None])
        return grad_logits_TV, None


def whole_parts(logits_TV: Tensor, labels_T: Tensor, divided: DividedRows | None, *, overwrites: bool) -> LogitParts:
    """Of each token: largest logit, sum of exp(logit - largest), and the label's logit, of the whole vocabulary.

    divided: the vocabulary entries that the logits have if tensor ranks share them; then the ranks exchange their parts, once.
    overwrites: whether the logits may be overwritten.
    """
    columns = Columns(first_entry(divided), logits_TV.shape[1] if divided is None else divided.rows)
    own = softmax_parts(logits_TV, labels_T, columns, overwrites=overwrites)
    return own if divided is None else combined(own, divided.link)


def first_entry(divided: DividedRows | None) -> int:
    """The vocabulary entry of the logits' first column."""
    return 0 if divided is None else divided.first_own_row


def combined(own: LogitParts, link: TensorLink) -> LogitParts:
    """The parts of the whole vocabulary, from those of all ranks, with the same bits on every rank. One gather."""
    parts = link.gather(torch.stack(own, dim=-1)).unbind(0)
    largest_T = parts[0][:, 0]
    for part in parts[1:]:
        largest_T = torch.maximum(largest_T, part[:, 0])
    sums_T, label_T = torch.zeros_like(largest_T), torch.zeros_like(largest_T)
    for part in parts:
        sums_T += part[:, 1] * (part[:, 0] - largest_T).exp()
        label_T += part[:, 2]
    return LogitParts(largest_T, sums_T, label_T)
