"""Cross entropy in fp32 that keeps only its input, the logits, for backward.

T tokens, V vocabulary entries (padding included).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.ops.softmax_reference import row_chunks


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
