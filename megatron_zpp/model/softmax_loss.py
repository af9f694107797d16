"""Cross entropy in fp32 of logits that exist whole; keeps the logits and two numbers per token for backward.

It is for logits whose vocabulary tensor ranks share, and for kernels of the loss. T tokens, V vocabulary entries of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.model.logit_parts import first_entry, whole_parts
from megatron_zpp.ops.softmax import TokenTerms, softmax_gradient
from megatron_zpp.tensor_parallel.vocabulary import DividedRows


def softmax_loss(logits: Tensor, labels: Tensor, divided: DividedRows | None) -> Tensor:
    """-log softmax(logits of all ranks)[label] of every token, in fp32, with the same bits on every rank.

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
