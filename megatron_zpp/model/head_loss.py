"""Head and cross entropy in chunks: the logits of a micro-batch never exist whole.

T tokens, N tokens of a chunk, H hidden size, V vocabulary entries (padding included), C entries of a chunk.

Forward keeps of every token the largest logit m and the sum s of exp(logit - m). With them any part of the logits gives its part of the
softmax, exp(logit - m) / s, so backward divides the vocabulary instead of the tokens and computes the logits again. Each row of the head's
gradient is then one product over all tokens, rounded once, and only the gradient of the hidden states is a sum over chunks, in fp32.
If tensor ranks share the vocabulary, they tell each other m, s and the label's logit of every token, once per chunk of forward.
Chunks of tokens in backward would need an fp32 sum as large as the head. The gradients cannot be made in forward, because there
the gradient of each token's loss is not known.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.model.cross_entropy import token_loss
from megatron_zpp.model.logit_parts import first_entry, whole_parts
from megatron_zpp.model.loss_chunks import chunk_columns, has_chunks, ranges
from megatron_zpp.model.softmax_loss import softmax_loss
from megatron_zpp.ops.extension import has_loss_kernels_for
from megatron_zpp.ops.softmax import TokenTerms, softmax_gradient
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
