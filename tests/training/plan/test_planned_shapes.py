"""Each rule of training/plan/shapes.py gives what torch itself gives on the meta device."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from harness.places import ROOT
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

HEADS, HALF_HEADS, SUMS = meta(2, 4, 64, 16), meta(2, 4, 64, 16, dtype=torch.bfloat16), meta(2, 4, 64)
TOKENS_FIRST = meta(2, 64, 4, 16).transpose(1, 2)
HALF_TOKENS_FIRST = meta(2, 64, 4, 16, dtype=torch.bfloat16).transpose(1, 2)

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
    **{f"aten.{name}.default": [(VALUES,), (HALF,), (TURNED,)] for name in ("abs", "sqrt", "clone", "ones_like", "zeros_like")},
    "aten.maximum.default": [(VALUES, VALUES), (VALUES, ROW)],
    "aten.flip.default": [(VALUES, [1]), (HALF, [0, 2])],
    "aten.tril.default": [(meta(4, 4),), (meta(4, 4, dtype=torch.bool),)],
    "aten.logical_not.default": [(TRUE,), (VALUES,)],
    "aten.bitwise_not.default": [(TRUE,), (IDS,)],
    "aten.bitwise_and.Tensor": [(TRUE, TRUE), (TRUE, meta(4, dtype=torch.bool))],
    "aten.floor_divide.default": [(IDS, 2), (IDS, IDS)],
    "aten.remainder.Scalar": [(IDS, 2), (VALUES, 2.0)],
    "aten.remainder.Tensor": [(IDS, IDS), (VALUES, ROW)],
    "aten.where.self": [(TRUE, VALUES, VALUES), (TRUE, VALUES, NUMBER), (meta(2, 3, 1, dtype=torch.bool), HALF, HALF)],
    "aten.gather.default": [(VALUES, 2, meta(2, 3, 1, dtype=torch.int64)), (HALF, 0, meta(1, 3, 4, dtype=torch.int64))],
    "aten.index.Tensor": [(meta(9, 5), [IDS]), (meta(9, 5, dtype=torch.bfloat16), [IDS])],
    "aten.sum.default": [(VALUES,), (HALF,), (TRUE,)],
    "aten.sum.dim_IntList": [(VALUES, [0]), (VALUES, [0, 1], True), (HALF, [-1]), (VALUES, None), (IDS, [0])],
    "aten.mean.default": [(VALUES,), (HALF,)],
    "aten.mean.dim": [(VALUES, [-1], True), (HALF, [0, 1])],
    "aten.amax.default": [(VALUES, [1]), (HALF, [-1], True), (VALUES,)],
    "aten.dot.default": [(ROW, ROW)],
    "aten.cumsum.default": [(meta(4, dtype=torch.float64), 0), (VALUES, 1)],
    "aten.mm.default": [(meta(2, 3), meta(3, 4)), (meta(2, 3), meta(4, 3).t()), (meta(3, 2).t(), meta(3, 4))],
    "aten.addmm.default": [(ROW, meta(2, 3), meta(3, 4)), (ROW, meta(2, 3), meta(4, 3).t())],
    "aten.bmm.default": [(VALUES, meta(2, 4, 5)), (VALUES, meta(2, 5, 4).transpose(1, 2))],
    "aten.baddbmm.default": [(meta(2, 3, 5), VALUES, meta(2, 4, 5))],
    "aten._softmax.default": [(VALUES, -1, False), (HALF, -1, False)],
    "aten._log_softmax.default": [(VALUES, -1, False), (HALF, 1, False)],
    "aten._safe_softmax.default": [(VALUES, -1), (HALF, -1)],
    "aten._softmax_backward_data.default": [(VALUES, VALUES, -1, torch.float32), (HALF, HALF, -1, torch.bfloat16)],
    "aten._scaled_dot_product_flash_attention_for_cpu.default": [(HEADS, HEADS, HEADS, 0.0, True), (TOKENS_FIRST,) * 3],
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": [(HEADS, HEADS, HEADS, HEADS, HEADS, SUMS, 0.0, True)],
    "aten._scaled_dot_product_flash_attention.default": [(HALF_HEADS, HALF_HEADS, HALF_HEADS, 0.0, True), (HALF_TOKENS_FIRST,) * 3],
    "aten._scaled_dot_product_efficient_attention.default": [
        (HEADS, HEADS, HEADS, None, True, 0.0, True),
        (TOKENS_FIRST, TOKENS_FIRST, TOKENS_FIRST, None, True, 0.0, True),
    ],
    "aten._scaled_dot_product_flash_attention_backward.default": [
        (*[HALF_HEADS] * 5, SUMS, None, None, 64, 64, 0.0, True, NUMBER, NUMBER),
    ],
    "aten.arange.default": [(7,)],
    "aten.arange.start": [(2, 9)],
    "aten.arange.start_step": [(0, 9, 2), (1, 9, 3)],
}


def described(result: Any, *, with_strides: bool = True) -> list[Any]:
    """Of each tensor its shape, dtype and strides."""
    found = result if isinstance(result, (list, tuple)) else [result]
    tensors = [other for other in found if isinstance(other, Tensor) and other.numel() > 1]
    return [(other.shape, other.dtype, other.stride() if with_strides else ()) for other in tensors]


def cases() -> list[Any]:
    return [pytest.param(rule, call, id=f"{rule}-{index}") for rule in RULES for index, call in enumerate(CASES.get(str(rule), []))]


def test_every_rule_has_a_case() -> None:
    assert {str(rule) for rule in RULES} <= set(CASES)


@pytest.mark.parametrize(("operator", "arguments"), cases())
def test_a_rule_gives_the_shapes_strides_and_dtypes_of_torch(operator: Any, arguments: tuple[Any, ...]) -> None:
    options = {"device": META} if "arange" in str(operator) else {}
    with_strides = "attention" not in str(operator)  # those of kernels are not those that torch gives on the meta device
    with standing_for("cuda"):
        planned = result_of(operator, arguments, options)
    assert described(planned, with_strides=with_strides) == described(operator(*arguments, **options), with_strides=with_strides)


@pytest.mark.parametrize("heads", [HEADS, TOKENS_FIRST], ids=["heads first", "tokens first"])
def test_attention_has_the_strides_that_its_kernel_gives_on_a_cpu(heads: Tensor) -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    real = torch.zeros(heads.shape).as_strided(heads.shape, heads.stride())
    planned, found = result_of(operator, (heads, heads, heads, 0.0, True), {}), operator(real, real, real, 0.0, True)
    assert planned[0].stride() == found[0].stride()
    assert described(planned, with_strides=False) == described(found, with_strides=False)


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


PROGRAM = """
import sys
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.plan.planned_step import plan_step
from megatron_zpp.training.sharding import grid_of

flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --global-batch-size 16 --micro-batch-size 1"
llama = f"{flags} --swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2 --bf16"
for of_run in (flags, f"{llama} --attention-dropout 0 --hidden-dropout 0 --zeropp lean", f"{llama} --tensor-model-parallel-size 2"):
    config = resolve(parse_flags(of_run.split()), 8, 4)
    for is_on_gpu in (False, True):
        plan_step(config, grid_of(config, 8), 128, is_on_gpu=is_on_gpu)
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""


def test_plans_of_usual_models_import_neither_the_compiler_nor_sympy_which_would_take_seconds_at_the_start_of_every_run() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"
