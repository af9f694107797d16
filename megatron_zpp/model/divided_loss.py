"""Cross entropy in fp32 of logits whose vocabulary tensor ranks share; keeps the logits and two numbers per token for backward.

T tokens, V vocabulary entries of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.model.logit_parts import row_chunks, softmax_parts, to_gradient
from megatron_zpp.tensor_parallel.vocabulary import DividedRows


def divided_token_loss(logits: Tensor, labels: Tensor, divided: DividedRows) -> Tensor:
    """-log softmax(logits of all ranks)[label] of every token, in fp32, with the same bits on every rank.

    logits: [..., V] fp32, bf16 or fp16, the entries that `divided` says; labels: [...] int64, of the whole vocabulary. Returns [...] fp32;
    the gradient is that of the rank's logits, in their dtype. Backward exchanges nothing.
    """
    loss_T: Tensor = _DividedTokenLoss.apply(logits.flatten(0, -2), labels.flatten(), divided)
    return loss_T.view(labels.shape)


class _DividedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, divided: DividedRows) -> Tensor:
        parts = softmax_parts(logits_TV, labels_T, divided, overwrites=False)
        ctx.save_for_backward(logits_TV, labels_T, parts.largest_R, parts.sum_R)
        ctx.divided = divided
        return parts.loss_R()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_T: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, labels_T, largest_T, sum_T = ctx.saved_tensors
        columns_T, factor_T = ctx.divided.columns(labels_T), grad_loss_T / sum_T
        grad_TV = logits_TV.clone()
        for rows in row_chunks(grad_TV):
            to_gradient(grad_TV[rows], columns_T[rows], largest_T[rows], factor_T[rows], grad_loss_T[rows])
        return grad_TV, None, None
