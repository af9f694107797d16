"""Each rule of training/plan/shapes.py gives what torch itself gives on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops.device_kind import standing_for
from megatron_zpp.training.plan.shapes import RULES, result_of

pytestmark = pytest.mark.pure

META = torch.device("meta")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


VALUES, ROW, HALF, NUMBER = meta(2, 3, 4), meta(4), meta(2, 3, 4, dtype=torch.bfloat16), meta()
TURNED = meta(4, 3, 2).transpose(0, 2)
IDS = meta(2, 3, dtype=torch.int64)
TRUE = meta(2, 3, 4, dtype=torch.bool)

# By the name of an operator, arguments of calls.
BOTH = [(VALUES, ROW), (ROW, VALUES), (TURNED, TURNED), (TURNED, VALUES), (HALF, HALF), (HALF, NUMBER), (VALUES, NUMBER), (HALF, VALUES)]
ALONE: list[tuple[Any, ...]] = [(VALUES,), (HALF,), (TURNED,)]
CASES: dict[str, list[tuple[Any, ...]]] = {
    **{f"aten.{name}.Tensor": [*BOTH, (IDS, IDS)] for name in ("add", "sub", "mul", "div")},
    **{f"aten.{name}.Scalar": [(VALUES, 2.0), (HALF, 2), (TURNED, 2.0)] for name in ("add", "sub", "mul", "div")},
    **{
        f"aten.{name}.default": ALONE
        for name in ("rsqrt", "reciprocal", "sigmoid", "silu", "gelu", "relu", "neg", "sin", "cos", "exp", "log")
    },
    "aten.clamp.default": [(VALUES, 1.0), (HALF, None, 2.0)],
    "aten.roll.default": [(VALUES, [1], [2]), (HALF, [1], [0])],
    "aten.threshold_backward.default": [(VALUES, VALUES, 0), (HALF, HALF, 0)],
    "aten.silu_backward.default": [(VALUES, VALUES), (HALF, HALF)],
    "aten.gelu_backward.default": [(VALUES, VALUES), (HALF, HALF)],
    "aten.addcmul.default": [(VALUES, VALUES, VALUES), (VALUES, ROW, VALUES), (HALF, HALF, HALF)],
    "aten.pow.Tensor_Scalar": [(VALUES, 2), (HALF, 0.5), (TURNED, 2)],
    "aten.pow.Scalar": [(2.0, VALUES)],
    "aten.masked_fill.Scalar": [(VALUES, TRUE, 0.0), (HALF, TRUE, 0.0)],
    "aten.masked_fill.Tensor": [(VALUES, TRUE, NUMBER)],
    "aten.cat.default": [([VALUES, VALUES], 1), ([VALUES, VALUES], -1), ([ROW, ROW],), ([HALF, VALUES],)],
    "aten.stack.default": [([VALUES, VALUES], 1), ([VALUES, VALUES], -1), ([HALF, HALF],)],
    "aten.embedding.default": [(meta(9, 5), IDS), (meta(9, 5, dtype=torch.bfloat16), IDS)],
    "aten.slice_backward.default": [(VALUES, [2, 3, 8], 2, 0, 4, 1)],
    "aten.empty_like.default": [(VALUES,), (HALF,), (TURNED,), (TRUE,)],
    "aten.any.default": [(VALUES,), (TRUE,)],
    "aten.native_layer_norm.default": [(VALUES, [4], ROW, ROW, 1e-5), (VALUES, [3, 4], None, None, 1e-5), (HALF, [4], None, None, 1e-5)],
    "aten.native_layer_norm_backward.default": [
        (VALUES, VALUES, [4], meta(2, 3, 1), meta(2, 3, 1), ROW, ROW, [True, True, needs_bias]) for needs_bias in (True, False)
    ],
    **{f"aten.{name}.{kind}": [(VALUES, other), (IDS, other)] for name in ("eq", "ne", "ge", "lt") for kind, other in (("Scalar", 1),)},
    **{f"aten.{name}.Tensor": [(VALUES, ROW), (IDS, IDS)] for name in ("eq", "ne", "ge", "lt")},
    "aten.arange.default": [(7,)],
    "aten.arange.start": [(2, 9)],
    "aten.arange.start_step": [(0, 9, 2), (1, 9, 3)],
}


def described(result: Any) -> list[Any]:
    found = result if isinstance(result, (list, tuple)) else [result]
    return [None if other is None else (other.shape, other.stride(), other.dtype, other.device) for other in found]


def cases() -> list[Any]:
    return [pytest.param(rule, call, id=f"{rule}-{index}") for rule in RULES for index, call in enumerate(CASES.get(str(rule), []))]


def test_every_rule_has_a_case() -> None:
    assert {str(rule) for rule in RULES} <= set(CASES)


@pytest.mark.parametrize(("operator", "arguments"), cases())
def test_a_rule_gives_the_shapes_strides_and_dtypes_of_torch(operator: Any, arguments: tuple[Any, ...]) -> None:
    options = {"device": META} if "arange" in str(operator) else {}
    with standing_for("cuda"):
        assert described(result_of(operator, arguments, options)) == described(operator(*arguments, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_statistics_of_layer_norm_have_the_dtype_that_they_have_there(dtype: torch.dtype) -> None:
    operator, values = torch.ops.aten.native_layer_norm.default, torch.empty(2, 3, 4, dtype=dtype)
    weight = torch.empty(4, dtype=dtype)
    found = operator(values, [4], weight, weight, 1e-5)
    with standing_for("cpu"):
        planned = result_of(operator, (values.to(META), [4], weight.to(META), weight.to(META), 1e-5), {})
    assert [(other.shape, other.dtype) for other in planned] == [(other.shape, other.dtype) for other in found]


def test_an_operator_that_writes_to_its_argument_returns_it() -> None:
    assert result_of(torch.ops.aten.add_.Tensor, (VALUES, ROW), {}) is VALUES
    assert result_of(torch.ops.aten._foreach_add_.Scalar, ([VALUES], 1.0), {}) is None
