"""Programs that compare kernels with the reference go on after a difference and say where it is, for a kernel of every family."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.forked import Forked
from torch import Tensor

from megatron_zpp.ops import softmax_reference
from megatron_zpp.ops.build import Build
from testbed.kernels import dropout_bits, gaussian_bits, guarded_rows, kernel_bits, mean_bits, softmax_errors
from testbed.kernels.bit_differences import NAMED, Comparison

pytestmark = pytest.mark.usefixtures("kernels")
KERNELS = torch.ops.megatron_zpp
OF_BLOCKS = {"encode_blocks", "decode_blocks", "decode_mean_blocks", "recode_mean_blocks"}


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


def test_a_kernel_that_is_wrong_in_one_block_is_named_with_op_dtype_bits_size_index_and_both_values() -> None:
    def encode_blocks(values: Tensor, payloads: Tensor, bits: int, *others: Any) -> None:
        KERNELS.encode_blocks(values, payloads, bits, *others)
        if values.dtype == torch.bfloat16 and bits == 4:
            payloads[1, 37] ^= 0x31

    comparison, right = Comparison(With(KERNELS, encode_blocks=encode_blocks)), Comparison()
    kernel_bits.check_all(comparison, 32, 3)
    kernel_bits.check_all(right, 32, 3)
    assert comparison.differing == {"encode_blocks": 20} and comparison.compared == right.count()
    values = next(kernel_bits.kinds_of_values(torch.bfloat16, 96))
    code = kernel_bits.encoded(KERNELS, values, 4, 32)[1, 37].item()
    assert comparison.differences[0] == (
        "encode_blocks, values bfloat16 [3, 96], bits 4, 3 blocks of 32, kind 0: row 1, byte 37 in the codes of block 2 is "
        f"0x{code ^ 0x31:02x} instead of 0x{code:02x}; 1 of 336 elements differs"
    )


def test_every_kernel_of_blocks_has_at_most_eight_differences_and_a_sentence_says_how_many_more_differ() -> None:
    wrong = {op: spoilt(getattr(KERNELS, op), 1, partial(add_one, row=0, element=0)) for op in OF_BLOCKS}
    comparison = Comparison(With(KERNELS, **wrong))
    kernel_bits.check_all(comparison, 32, 1)
    assert comparison.compared == comparison.differing.total() == 360
    named = [difference.partition(",")[0] for difference in comparison.differences]
    assert {op: named.count(op) for op in OF_BLOCKS} == dict.fromkeys(OF_BLOCKS, NAMED)
    assert comparison.more() == (
        "more results differ: 112 of encode_blocks, 112 of decode_blocks, 52 of decode_mean_blocks, 52 of recode_mean_blocks"
    )
    with pytest.raises(AssertionError, match="0x[0-9a-f]{8} instead of 0x[0-9a-f]{8}(?s:.*)more results differ"):
        comparison.count()


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


def test_of_gaussian_codes_scales_come_first_and_a_wrong_byte_or_value_has_its_block() -> None:
    check = partial(gaussian_bits.check_values, blocks=3)
    scale = first_difference(check, "encode_gaussian", 1, 2, 4)
    assert "values float32 [3, 768], bits 1, rounds 1, key 5, 3 blocks of 256, kind 2: row 2, byte 4 in the scale of block 2 is" in scale
    codes = first_difference(check, "encode_gaussian", 1, 2, 16 + 33)
    assert "row 2, byte 49 in the codes of block 1 is" in codes and codes.endswith("; 1 of 480 elements differs")
    value = first_difference(partial(gaussian_bits.check_any_payloads, blocks=3), "decode_mean_gaussian", 1, 1, 700)
    assert value.startswith("decode_mean_gaussian, payloads [1, 3, 112], bits 1, rounds 1, keys [1], 3 blocks of 256, any bytes")
    assert "row 1, element 700 in block 2 is 0x" in value


def test_a_wrong_mean_has_its_element_counted_from_the_first_of_its_row() -> None:
    difference = first_difference(mean_bits.check, "mean_values", 1, 2, 38)
    assert difference.startswith("mean_values, values float32 [1, 3, 40], before float32 [3, 40], first 0, gap 0: row 2, element 38 is 0x")
    assert difference.endswith("; 1 of 120 elements differs")

    def into_the_gap(storage: Tensor) -> None:
        storage.as_strided((1,), (1,), storage.storage_offset() - 1).fill_(1.0)

    comparison = Comparison(With(KERNELS, mean_values=spoilt(KERNELS.mean_values, 1, into_the_gap)))
    comparison.same("mean_values", mean_bits.mean, torch.ones(2, 1, 8).half(), torch.zeros(1, 8), 3, 2, True)
    assert comparison.differences == [
        "mean_values, values float16 [2, 1, 8], before float32 [1, 8], first 3, gap 2, accumulate: "
        "row 0, element -1 beside the run is 0x3f800000 instead of 0x40e00000; 1 of 13 elements differs"
    ]


def test_wrong_dropout_has_its_element_and_what_it_depends_on() -> None:
    def spoil(dropped: Tensor) -> None:
        add_one(dropped.unsqueeze(0), 0, 1020)

    comparison = Comparison(With(KERNELS, drop_values=spoilt(KERNELS.drop_values, 1, spoil)))
    dropout_bits.check(comparison)
    assert comparison.compared == 240 and comparison.differing == {"drop_values": 3 * 3 * 8}
    difference = comparison.differences[0]
    assert difference.startswith("drop_values, values float32 [1023], source first ")
    assert f"key {2**63 - 1 - 1023}, first index 0, threshold 0, scale 1: element 1020 is 0x" in difference


def test_rows_at_the_end_of_memory_name_members_and_values_of_their_runs() -> None:
    check = partial(guarded_rows.check_rows, block_numel=32, blocks=2, first=3, gap=2, turn=0)
    payload = first_difference(check, "encode_blocks", 1, 1, 33)
    assert "values float32 [2, 64], first 3, gap 2, bits 4, 2 blocks of 32: member 0, row 1, byte 33 in the scale of block 0 is" in payload
    assert payload.endswith("; 3 of 288 elements differ")  # a payload of each member
    assert "row 1, element 33 in block 1 is 0x" in first_difference(check, "decode_blocks", 1, 1, 33)


class Loss:
    """The ops of the loss in plain torch, with the NaN of the kernels."""

    softmax_parts = staticmethod(partial(softmax_reference.softmax_parts, overwrites=False))

    @staticmethod
    def softmax_gradient(*arguments: Any) -> None:
        softmax_reference.softmax_gradient(*arguments)
        gradient = arguments[-1]
        gradient.masked_fill_(gradient.isnan(), math.nan)


def test_a_wrong_result_of_the_loss_is_named_with_its_value_the_expected_one_and_the_bound() -> None:
    right = Comparison(Loss())
    softmax_errors.check(right)
    assert right.count() == 12

    def spoil(sums: Tensor) -> None:
        sums[3] *= 1.001

    wrong = Comparison(With(Loss(), softmax_parts=spoilt(Loss.softmax_parts, 5, spoil)))
    softmax_errors.check(wrong)
    assert wrong.compared == 12
    case = softmax_errors.case_of(torch.float32, 1)
    sums = softmax_errors.parts_of(wrong.ops, case.logits, case.labels)[1]
    assert wrong.differences[0].startswith(
        f"softmax_parts, sums of float32 logits [5, 1], first 0, gap 0: element 3 is {sums[3].item():.9g} instead of 1, within "
    )
    assert wrong.differences[0].endswith("; 1 of 5 elements differs")


def test_a_gradient_that_differs_from_place_to_place_is_named_with_its_bits() -> None:
    def spoil(gradient: Tensor) -> None:
        if gradient.storage_offset() == 1:
            add_one(gradient, 4, 6)

    wrong = Comparison(With(Loss(), softmax_gradient=spoilt(Loss.softmax_gradient, 6, spoil)))
    softmax_errors.check_case(wrong, softmax_errors.case_of(torch.bfloat16, 7))
    named = [difference for difference in wrong.differences if "the first place has other bits" in difference]
    assert len(named) == 2  # the first place has its gradient where it is wrong
    sentence = "softmax_gradient, gradient, of which the first place has other bits, of bfloat16 logits [5, 7], first 8, gap 9"
    assert named[0].startswith(f"{sentence}: row 4, element 6 is 0x") and named[0].endswith("; 1 of 35 elements differs")


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


def test_an_op_that_raises_is_a_difference_and_other_cases_are_compared_unless_the_device_is_broken() -> None:
    def refuse(values: Tensor, *others: Any) -> None:
        if values.dtype == torch.float16:
            raise RuntimeError("no kernel for Half")
        KERNELS.encode_blocks(values, *others)

    comparison = Comparison(With(KERNELS, encode_blocks=refuse))
    kernel_bits.check_all(comparison, 32, 1)
    assert comparison.differing == {"encode_blocks": 40} and comparison.compared == 360
    assert comparison.differences[0] == (
        "encode_blocks, values float16 [3, 32], bits 4, 1 blocks of 32, kind 0: RuntimeError: no kernel for Half"
    )
    broken = Comparison(With(KERNELS, encode_blocks=refuse), is_fatal=lambda error: "no kernel" in str(error))
    with pytest.raises(RuntimeError, match="no kernel for Half"):
        kernel_bits.check_all(broken, 32, 1)


PROGRAM = """
import sys
import torch
from testbed.kernels import bit_differences, mean_bits

def check(comparison):
    right = torch.ops.megatron_zpp.mean_values
    class Ops:
        def mean_values(self, members, mean, accumulate):
            right(members, mean, accumulate)
            mean[..., :1] = 5.5
    comparison.ops = Ops()
    mean_bits.check(comparison)

bit_differences.run_as_program(check)
"""


def test_a_program_goes_on_prints_its_count_and_ends_with_1_and_all_differences_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = Forked(tmp_path / "program.py", Build().make()).finished()
    assert (done.returncode, done.stdout) == (1, "288\n")
    *differences, more = done.stderr.splitlines()
    assert [difference.partition(",")[0] for difference in differences] == ["mean_values"] * NAMED
    assert more == f"more results differ: {288 * 7 // 8 - NAMED} of mean_values"  # all but those of no values
