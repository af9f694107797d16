"""The results of operators on the meta device, whose shapes and dtypes are all that they have.

torch computes many of them in Python, in a tenth of a millisecond and more each, and imports its compiler and sympy for it, which takes
longer than a plan. The operators of the model and of the engine that it does so for are here; for any other, torch is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops.device_kind import kind_of

_aten = torch.ops.aten


def result_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operator returns. One that only writes to what it is given does nothing."""
    written = _written(operator)
    if written is not None and (not isinstance(args[0], Tensor) or args[0].is_meta):
        return args[0] if written else None
    if "out" in kwargs and kwargs["out"].is_meta:
        return kwargs["out"]
    rule = RULES.get(operator)
    result = rule(*args, **kwargs) if rule is not None and _is_on_meta(args, kwargs) else None
    return operator(*args, **kwargs) if result is None else result


def _is_on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the first tensor is on the meta device, or what is made without one."""
    for value in args:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, Tensor):
            return first.is_meta
    return str(kwargs.get("device")) == "meta"


@cache  # reading a schema takes longer than most operations
def _written(operator: Any) -> bool | None:
    """Whether the operator returns its first argument, to which it writes; False if it writes and returns nothing, else None."""
    schema = operator._schema
    if schema.name.endswith("_") and schema.arguments[0].alias_info is not None and schema.arguments[0].alias_info.is_write:
        return len(schema.returns) > 0
    return None


def _elementwise(*args: Any, alpha: float = 1, approximate: str = "none") -> Tensor | None:
    """The broadcast shape, and the strides of an argument that has it and the dtype. alpha: of a sum. approximate: of GELU."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    dtype = reduce(torch.promote_types, {other.dtype for other in tensors if other.dim() > 0} or {other.dtype for other in tensors})
    if not dtype.is_floating_point and any(isinstance(value, float if dtype is torch.int64 else (int, float)) for value in args):
        return None  # the number decides about the dtype
    shape = _broadcast(tensors)
    whole = next((other for other in tensors if other.shape == shape and other.is_meta), None)
    return torch.empty(shape, dtype=dtype, device="meta") if whole is None else _like(whole, dtype)


def _of_fractions(*args: Any, **options: Any) -> Tensor | None:
    """Integers would become floating-point numbers."""
    return _elementwise(*args, **options) if args[0].is_floating_point() else None


def _like(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the same shape whose dims have the same order in memory."""
    if values.is_contiguous():
        return values.new_empty(values.shape, dtype=dtype)
    strides, step = list(values.stride()), 1
    for dim in sorted(range(values.dim()), key=lambda dim: (values.stride(dim), -dim)):
        strides[dim], step = step, step * values.shape[dim]
    return torch.empty_strided(values.shape, strides, dtype=dtype or values.dtype, device="meta")


def _compared(*args: Any) -> Tensor:
    return torch.empty(_broadcast([value for value in args if isinstance(value, Tensor)]), dtype=torch.bool, device="meta")


def _logical(*args: Any) -> Tensor | None:
    return _compared(*args) if all(value.dtype is torch.bool for value in args if isinstance(value, Tensor)) else None


def _broadcast(tensors: Sequence[Tensor]) -> torch.Size:
    """The shape to which all are expanded; torch's own function imports sympy."""
    first, *others = tensors
    if all(other.dim() == 0 or other.shape == first.shape for other in others):
        return first.shape
    dims = zip_longest(*(reversed(other.shape) for other in tensors), fillvalue=1)
    return torch.Size([max(sizes, key=lambda size: (size != 1, size)) for sizes in dims][::-1])


def _reduced(
    values: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    if not values.is_floating_point():
        return None
    gone = {dim % max(1, values.dim()) for dim in (dims or range(values.dim()))}
    shape = [1 if dim in gone else size for dim, size in enumerate(values.shape) if keepdim or dim not in gone]
    return values.new_empty(shape, dtype=dtype)


def _same(values: Tensor, *options: Any) -> Tensor:
    return _like(values)


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(other.shape[dim] for other in tensors)
    return first.new_empty(shape, dtype=reduce(torch.promote_types, (other.dtype for other in tensors)))


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(tensors))
    return tensors[0].new_empty(shape)


def _arange(
    start: int, end: int | None = None, step: int = 1, *, dtype: torch.dtype | None = None, device: torch.device, **options: Any
) -> Tensor:
    first, last = (0, start) if end is None else (start, end)
    return torch.empty(-(-(last - first) // step), dtype=dtype or torch.int64, device=device)


def _empty_like(values: Tensor, *, dtype: torch.dtype | None = None, memory_format: Any = None, **options: Any) -> Tensor:
    return values.new_empty(values.shape, dtype=dtype) if memory_format is torch.contiguous_format else _like(values, dtype)


def _layer_norm(values: Tensor, shape: Sequence[int], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A GPU keeps means and deviations in fp32, a CPU in the dtype of the values."""
    rows = (*values.shape[: values.dim() - len(shape)], *[1] * len(shape))
    dtype = values.dtype if kind_of("meta") == "cpu" else torch.float32
    mean, deviation = (values.new_empty(rows, dtype=dtype) for _ in range(2))
    return values.new_empty(values.shape), mean, deviation


def _layer_norm_backward(grad: Tensor, values: Tensor, shape: Sequence[int], mean: Tensor, deviation: Tensor, *parameters: Any) -> Any:
    *both, needed = parameters
    results = [values.new_empty(values.shape), *(None if other is None else other.new_empty(other.shape) for other in both)]
    return tuple(result if is_needed else None for result, is_needed in zip(results, needed, strict=True))


def _index(values: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """One element for each index, if there is one for every dim."""
    given = [index for index in indices if index is not None]
    return values.new_empty(_broadcast(given)) if len(given) == values.dim() and given[0].dtype is torch.int64 else None


# ---- attention, whose kernels have the tokens of all heads one after the other, [B, S, N, D], in what they return


def _sums(query_BNSD: Tensor, multiple: int = 1) -> Tensor:
    """One number for each token and head."""
    samples, heads, length, _ = query_BNSD.shape
    return query_BNSD.new_empty((samples, heads, -(-length // multiple) * multiple), dtype=torch.float32)


def _flash(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    seed, offset = query.new_empty((2,), dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    return _like(query), _sums(query), None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty((0,))


def _efficient(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    return _like(query), _sums(query, multiple=32), seed, offset


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any, **others: Any) -> Any:
    return _like(query), _like(key), _like(value)


_OF_FRACTIONS = (
    *("rsqrt", "reciprocal", "sigmoid", "threshold_backward", "addcmul", "roll", "silu", "gelu", "silu_backward", "gelu_backward"),
    *("relu", "neg", "sin", "cos", "exp", "log", "sqrt", "abs", "maximum"),
)
RULES: dict[Any, Callable[..., Any]] = {
    **{getattr(_aten, name).Tensor: _elementwise for name in ("add", "sub", "mul", "remainder")},
    **{getattr(_aten, name).Scalar: _elementwise for name in ("add", "sub", "mul", "remainder")},
    **dict.fromkeys((_aten.clamp.default, _aten.floor_divide.default), _elementwise),
    **dict.fromkeys((_aten.div.Tensor, _aten.div.Scalar), _of_fractions),
    **{getattr(_aten, name).default: _of_fractions for name in _OF_FRACTIONS},
    _aten.pow.Tensor_Scalar: _of_fractions,
    _aten.pow.Scalar: lambda base, exponent: _of_fractions(exponent),
    _aten.where.self: lambda chosen, one, other: one.new_empty(_broadcast((chosen, one, other)), dtype=torch.result_type(one, other)),
    **{overload: _compared for name in ("eq", "ne", "ge", "lt") for overload in (getattr(_aten, name).Scalar, getattr(_aten, name).Tensor)},
    **dict.fromkeys((_aten.bitwise_and.Tensor, _aten.bitwise_not.default, _aten.logical_not.default), _logical),
    _aten.cumsum.default: _same,
    **dict.fromkeys((_aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.tril.default, _aten.flip.default), _same),
    **dict.fromkeys((_aten.empty_like.default, _aten.ones_like.default, _aten.zeros_like.default), _empty_like),
    _aten.clone.default: _empty_like,
    **dict.fromkeys((_aten.arange.default, _aten.arange.start, _aten.arange.start_step), _arange),
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.slice_backward.default: lambda grad, sizes, *place: grad.new_empty(sizes),
    _aten.any.default: lambda values: values.new_empty((), dtype=torch.bool),
    _aten.dot.default: lambda one, other: one.new_empty(()),
    **dict.fromkeys((_aten.mean.dim, _aten.sum.dim_IntList, _aten.amax.default), _reduced),
    **dict.fromkeys((_aten.sum.default, _aten.mean.default), lambda values, **options: _reduced(values)),
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default), _product),
    **dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default), lambda added, left, right, **factors: _product(left, right)),
    _aten.embedding.default: lambda weight, indices, *options: weight.new_empty((*indices.shape, weight.shape[1])),
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.index.Tensor: _index,
    _aten.gather.default: lambda values, dim, index, **options: values.new_empty(index.shape),
    _aten._safe_softmax.default: _same,
    **dict.fromkeys(
        (_aten._softmax.default, _aten._log_softmax.default), lambda values, dim, widens: _like(values, torch.float32 if widens else None)
    ),
    _aten._softmax_backward_data.default: lambda grad, output, dim, dtype: output.new_empty(output.shape, dtype=dtype),
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: lambda query, *others, **options: (_like(query), _sums(query)),
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
    _aten._scaled_dot_product_flash_attention_backward.default: _attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
