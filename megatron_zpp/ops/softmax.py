"""The softmax of logits as a loss needs it: three numbers per token in forward, and the gradient of the logits in backward.

On GPUs the kernels of csrc/softmax/ run if they are loaded. They read the logits once, and backward writes the gradient once, so nothing
exists in fp32 beside 16-bit logits. Elsewhere megatron_zpp.ops.softmax_reference runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_zpp.ops import extension, planned, softmax_reference
from megatron_zpp.ops.checks import VALUE_DTYPES, check_equal, check_rows_apart, check_same_device, check_values

LOGIT_DTYPES = (*VALUE_DTYPES, torch.float64)  # the last without kernels


class Columns(NamedTuple):
    """The entries of a vocabulary of `entries` that logits have: column 0 is entry `first`."""

    first: int
    entries: int


class LogitParts(NamedTuple):
    """Of each token, in fp32. For logits of a part of the vocabulary: of this part."""

    largest_T: Tensor
    sums_T: Tensor  # of exp(logit - largest)
    label_T: Tensor  # the label's logit; 0 if another part has it

    def loss_T(self) -> Tensor:
        """-log softmax(logits)[label]."""
        return self.sums_T.log() - (self.label_T - self.largest_T)


class TokenTerms(NamedTuple):
    """Of each token, what the gradient of its logits depends on beside them: the label, the whole softmax, and the gradient of the loss."""

    labels_T: Tensor  # int64
    largest_T: Tensor
    sums_T: Tensor
    grad_loss_T: Tensor


def softmax_parts(logits_TC: Tensor, labels_T: Tensor, columns: Columns, *, overwrites: bool) -> LogitParts:
    """Largest logit, sum of exponentials and label's logit of each token.

    logits_TC: fp32, bf16, fp16, or fp64 which is rounded to fp32; contiguous inner dim. labels_T: int64, entries of the whole
    vocabulary. A logit of -inf adds nothing to a sum; NaN and +inf make it NaN. If all are -inf, the sum is 0. A label outside of the
    vocabulary is an error; on a GPU it ends the run.
    overwrites: whether the logits may be overwritten. Raises ValueError if the tensors do not fit together.
    """
    check_values("logits", logits_TC, LOGIT_DTYPES)
    _check_tokens(logits_TC, labels=labels_T)
    parts = LogitParts(*(torch.empty(labels_T.shape, dtype=torch.float32, device=logits_TC.device) for _ in LogitParts._fields))
    kernels = _kernels_for(logits_TC)
    if kernels is not None:
        kernels.softmax_parts(logits_TC, labels_T.contiguous(), *columns, *parts)
    else:
        softmax_reference.softmax_parts(logits_TC, labels_T, *columns, *parts, overwrites=overwrites)
    return parts


def softmax_gradient(logits_TC: Tensor, first: int, terms: TokenTerms, gradient_TC: Tensor) -> None:
    """Writes the gradient of the logits, rounded once, to `gradient_TC`, which may be `logits_TC` itself.

    first: the vocabulary entry of column 0. gradient_TC: shape and dtype of the logits, contiguous inner dim. Raises ValueError if the
    tensors do not fit together.
    """
    check_values("logits", logits_TC, LOGIT_DTYPES)
    check_values("gradient", gradient_TC, (logits_TC.dtype,))
    check_rows_apart("gradient", gradient_TC)
    check_equal("rows of gradient", gradient_TC.shape[0], logits_TC.shape[0])
    check_equal("columns of gradient", gradient_TC.shape[1], logits_TC.shape[1])
    _check_tokens(logits_TC, gradient=gradient_TC, labels=terms.labels_T, largest=terms.largest_T, sums=terms.sums_T)
    _check_tokens(logits_TC, grad_loss=terms.grad_loss_T)
    labels_T, *numbers = (term.contiguous() for term in terms)
    ops = _kernels_for(logits_TC) or softmax_reference
    ops.softmax_gradient(logits_TC, labels_T, first, *numbers, gradient_TC)


def _kernels_for(logits_TC: Tensor) -> ModuleType | Any | None:
    """Kernels, or what stands for them in a plan; None if there are none."""
    if logits_TC.dtype not in VALUE_DTYPES or not extension.has_loss_kernels_for(logits_TC.device.type):
        return None
    return planned if logits_TC.is_meta else torch.ops.megatron_zpp


def _check_tokens(logits_TC: Tensor, **terms: Tensor) -> None:
    for name, term in terms.items():
        check_equal(f"tokens of {name}", term.shape[0], logits_TC.shape[0])
    check_same_device(logits=logits_TC, **terms)
