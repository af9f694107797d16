"""What compares kernels with the reference goes on after a difference and says where it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import kernel_bits
from harness.bit_differences import NAMED, Comparison
from torch import Tensor

pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = torch.ops.megatron_zpp


class With:
    """Ops of which some are others."""

    def __init__(self, ops: Any, **others: Callable[..., None]) -> None:
        self._ops, self._others = ops, others

    def __getattr__(self, op: str) -> Any:
        return self._others.get(op) or getattr(self._ops, op)


def spoilt(op: Callable[..., None], written: int, spoil: Callable[..., None]) -> Callable[..., None]:
    """The op, and then `spoil` of the arguments, of which the one numbered `written` is written."""

    def call(*arguments: Any) -> None:
        op(*arguments)
        spoil(arguments[written])

    return call


def add_one(result: Tensor, row: int, element: int) -> None:
    """Adds 1 to the bits of an element, if the result has it."""
    if row < len(result) and element < result.shape[1]:
        result.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[result.itemsize])[row, element] += 1


def first_difference(check: Callable[[Comparison], None], op: str, written: int, row: int, element: int, ops: Any = KERNELS) -> str:
    """The first difference of an op whose results have one wrong element; no other op has any."""
    wrong = spoilt(getattr(ops, op), written, partial(add_one, row=row, element=element))
    comparison = Comparison(With(ops, **{op: wrong}))
    check(comparison)
    assert set(comparison.differing) == {op} and len(comparison.differences) == min(NAMED, comparison.differing[op])
    return comparison.differences[0]


def test_a_wrong_scale_and_a_byte_beside_payloads_are_told_from_codes() -> None:
    def check(comparison: Comparison) -> None:
        comparison.same("encode_blocks", kernel_bits.encoded, torch.ones(2, 96), 8, 32, True, 5)

    for byte, words in ((96 + 9, "byte 105 in the scale of block 2"), (112, "byte 112 beside codes and scales")):
        difference = first_difference(check, "encode_blocks", 1, 1, byte)
        assert f"bits 8, rotated, noise key 5, 3 blocks of 32: row 1, {words} is" in difference


def test_another_dtype_or_shape_is_a_difference() -> None:
    comparison = Comparison()
    comparison.equal("an op", torch.ones(3).half(), torch.ones(3), "a case")
    comparison.equal("an op", torch.ones(3, 1), torch.ones(3), "a case")
    assert comparison.differences == [
        "an op, a case: the result is float16 [3] instead of float32 [3]",
        "an op, a case: the result is float32 [3, 1] instead of float32 [3]",
    ]


def test_nan_and_minus_zero_are_compared_as_bits_and_by_value_nan_equals_nan_alone() -> None:
    comparison = Comparison()
    nan, zero = torch.tensor([math.nan]), torch.zeros(1)
    comparison.equal("an op", nan, nan.clone(), "a case")
    comparison.within("an op", nan, nan, zero, "a case")
    assert comparison.count() == 0
    comparison.equal("an op", -zero, zero, "a case")
    comparison.within("an op", nan, zero, zero, "a case")
    assert comparison.differences == [
        "an op, a case: element 0 is 0x80000000 instead of 0x00000000; 1 of 1 elements differs",
        "an op, a case: element 0 is nan instead of 0, within 0; 1 of 1 elements differs",
    ]
