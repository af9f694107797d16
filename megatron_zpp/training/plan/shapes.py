"""The results of operators on the meta device, whose shapes and dtypes are all that they have.

torch computes many of them in Python, in a tenth of a millisecond and more each, and imports its compiler and sympy for it, which takes
longer than a plan. The operators of the model and of the engine that it does so for are here; for any other, torch is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops.device_kind import kind_of

_aten = torch.ops.aten


def result_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operator returns. One that only writes to its arguments does nothing."""
    written = _written(operator)
    if written is not None and (not isinstance(args[0], Tensor) or args[0].is_meta):
        return args[0] if written else None
    rule = RULES.get(operator)
    result = rule(*args, **kwargs) if rule is not None else None
    return operator(*args, **kwargs) if result is None else result


@cache  # reading a schema takes longer than most operations
def _written(operator: Any) -> bool | None:
    """Whether the operator returns its first argument, to which it writes; False if it writes and returns nothing, None if it is another."""
    schema = operator._schema
    if schema.name.endswith("_") and schema.arguments[0].alias_info is not None and schema.arguments[0].alias_info.is_write:
        return len(schema.returns) > 0
    return None


def _elementwise(*args: Any, approximate: str = "none") -> Tensor | None:
    """Of floating-point numbers: the broadcast shape, and the strides of the first argument that has it. approximate: of GELU."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    of_dims = [other for other in tensors if other.dim() > 0] or tensors
    if not all(other.is_floating_point() and other.is_meta for other in of_dims):
        return None
    shape, dtype = _broadcast(tensors), reduce(torch.promote_types, (other.dtype for other in of_dims))
    whole = next((other for other in of_dims if other.shape == shape and other.dtype == dtype), None)
    return of_dims[0].new_empty(shape, dtype=dtype) if whole is None else whole.clone()


def _compared(*args: Any) -> Tensor | None:
    tensors = [value for value in args if isinstance(value, Tensor)]
    return tensors[0].new_empty(_broadcast(tensors), dtype=torch.bool) if all(other.is_meta for other in tensors) else None


def _broadcast(tensors: Sequence[Tensor]) -> torch.Size:
    first, *others = tensors
    if all(other.dim() == 0 or other.shape == first.shape for other in others):
        return first.shape
    return torch.broadcast_shapes(*(other.shape for other in tensors))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if any(other.dtype != first.dtype or other.dim() != first.dim() for other in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(other.shape[dim] for other in tensors)
    return first.new_empty(shape)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(tensors))
    return tensors[0].new_empty(shape)


def _embedding(weight: Tensor, indices: Tensor, *options: Any) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _slice_backward(grad: Tensor, sizes: Sequence[int], *options: Any) -> Tensor:
    return grad.new_empty(sizes)


def _arange(
    start: int, end: int | None = None, step: int = 1, *, dtype: torch.dtype | None = None, device: torch.device, **options: Any
) -> Tensor:
    first, last = (0, start) if end is None else (start, end)
    return torch.empty(-(-(last - first) // step), dtype=dtype or torch.int64, device=device)


def _empty_like(values: Tensor, *, dtype: torch.dtype | None = None, memory_format: Any = None, **options: Any) -> Tensor | None:
    if memory_format is torch.contiguous_format or values.is_contiguous():
        return values.new_empty(values.shape, dtype=dtype)
    return values.clone() if dtype in (None, values.dtype) else None


def _layer_norm(values: Tensor, shape: Sequence[int], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A GPU keeps means and deviations in fp32, a CPU in the dtype of the values."""
    rows = (*values.shape[: values.dim() - len(shape)], *[1] * len(shape))
    dtype = values.dtype if kind_of("meta") == "cpu" else torch.float32
    return (values.new_empty(values.shape), *(values.new_empty(rows, dtype=dtype) for _ in range(2)))


def _layer_norm_backward(grad: Tensor, values: Tensor, shape: Sequence[int], mean: Tensor, deviation: Tensor, *parameters: Any) -> Any:
    *both, needed = parameters
    results = [values.new_empty(values.shape), *(None if other is None else other.new_empty(other.shape) for other in both)]
    return tuple(result if is_needed else None for result, is_needed in zip(results, needed, strict=True))


_NAMES = (
    *("rsqrt", "reciprocal", "sigmoid", "threshold_backward", "addcmul", "roll", "silu", "gelu", "silu_backward", "gelu_backward"),
    *("relu", "neg", "clamp", "sin", "cos", "exp", "log"),
)
RULES: dict[Any, Callable[..., Any]] = {
    **{getattr(_aten, name).Tensor: _elementwise for name in ("add", "sub", "mul", "div")},
    **{getattr(_aten, name).Scalar: _elementwise for name in ("add", "sub", "mul", "div")},
    **{getattr(_aten, name).default: _elementwise for name in _NAMES},
    _aten.pow.Tensor_Scalar: _elementwise,
    _aten.pow.Scalar: lambda base, exponent: exponent.clone(),
    **{overload: lambda values, *options: values.clone() for overload in (_aten.masked_fill.Scalar, _aten.masked_fill.Tensor)},
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.embedding.default: _embedding,
    _aten.slice_backward.default: _slice_backward,
    **dict.fromkeys((_aten.arange.default, _aten.arange.start, _aten.arange.start_step), _arange),
    **{overload: _compared for name in ("eq", "ne", "ge", "lt") for overload in (getattr(_aten, name).Scalar, getattr(_aten, name).Tensor)},
    _aten.empty_like.default: _empty_like,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.any.default: lambda values: values.new_empty((), dtype=torch.bool),
}
