"""The softmax of logits in plain torch: parts of a vocabulary, logits that are not finite, and errors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops.softmax import Columns, TokenTerms, softmax_gradient, softmax_parts

LOGITS, LABELS = torch.zeros(4, 6), torch.tensor([0, 7, 9, 2])
NUMBERS = torch.ones(4)


def test_a_label_of_another_part_of_the_vocabulary_has_the_logit_0_and_no_place_in_the_gradient() -> None:
    logits = torch.arange(12.0).view(2, 6)
    parts = softmax_parts(logits, torch.tensor([3, 7]), Columns(6, 20), overwrites=False)
    assert parts.label_T.tolist() == [0.0, logits[1, 1]]
    softmax_gradient(logits, 6, TokenTerms(torch.tensor([3, 7]), *parts[:2], torch.ones(2)), gradient := torch.empty(2, 6))
    assert bool((gradient[0] > 0).all()) and (gradient[1] < 0).tolist() == [False, True, False, False, False, False]


def test_a_part_whose_logits_are_all_minus_infinity_adds_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0], [-math.inf, 0.0], [-math.inf, -math.inf]])
    parts = softmax_parts(logits, torch.tensor([0, 1, 2]), Columns(0, 4), overwrites=False)
    assert parts.sums_T.tolist() == [2.0, 1.0, 0.0] and parts.largest_T.tolist() == [0.0, 0.0, -math.inf]
    largest = torch.zeros(3)  # another part has it
    softmax_gradient(logits, 0, TokenTerms(torch.full((3,), 3), largest, torch.ones(3), torch.ones(3)), logits)
    assert logits.tolist() == [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_has_the_same_bits_in_place_and_beside_the_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradient, terms = torch.empty_like(logits), TokenTerms(LABELS, NUMBERS, NUMBERS, NUMBERS)
    before = logits.clone()
    softmax_gradient(logits, 0, terms, gradient)
    assert torch.equal(logits, before)
    softmax_gradient(logits, 0, terms, logits)
    assert torch.equal(logits, gradient)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": LOGITS.int()}, "logits is torch.int32; expected torch.float32 or torch.bfloat16 or torch.float16 or torch.float64."),
        ({"logits": LOGITS.T}, "logits has strides [1, 6]; expected a contiguous inner dim."),
        ({"labels": LABELS[:3]}, "tokens of labels: 3; expected 4."),
        ({"gradient": LOGITS.half()}, "gradient is torch.float16; expected torch.float32."),
        ({"gradient": LOGITS[:, :5]}, "columns of gradient: 5; expected 6."),
        ({"grad_loss": NUMBERS[:1]}, "tokens of grad_loss: 1; expected 4."),
        ({"sums": NUMBERS.to("meta")}, "sums on meta; expected one device."),
    ],
)
def test_a_wrong_argument_is_named(changed: dict[str, Tensor], message: str) -> None:
    given: dict[str, Any] = {"logits": LOGITS, "labels": LABELS, "largest": NUMBERS, "sums": NUMBERS, "grad_loss": NUMBERS, **changed}
    terms = TokenTerms(*(given[name] for name in ("labels", "largest", "sums", "grad_loss")))
    with pytest.raises(ValueError, match=re.escape(message)):
        softmax_gradient(given["logits"], 0, terms, given.get("gradient", LOGITS))
    if changed.keys() & {"logits", "labels"}:
        with pytest.raises(ValueError, match=re.escape(message)):
            softmax_parts(given["logits"], given["labels"], Columns(0, 10), overwrites=False)
