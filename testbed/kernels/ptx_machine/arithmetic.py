"""What the instructions that touch no memory compute, for all threads at once. Source: NVIDIA's PTX ISA 9.0, chapter 9.7.

Results that are NaN have the bits 0x7fffffff, or 0x7fff in 16 bits, as on all GPUs; numpy's would have others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]  # [threads], or a scalar that all threads have
Operation = Callable[..., Values]

DTYPES: dict[str, np.dtype[Any]] = {
    **{f"{kind}{bits}": np.dtype(f"uint{bits}") for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype("float16"),
    "f32": np.dtype("float32"),
    "f64": np.dtype("float64"),
    "pred": np.dtype("bool"),
}
QUIET_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
MASK_16 = 0x7FFF
SIGN: dict[str, Any] = {"f32": np.uint32(1 << 31), "f64": np.uint64(1 << 63)}


def canonical(values: Values) -> Values:
    """The fp32 results with the one NaN that GPUs make."""
    bad = np.isnan(values)
    return np.where(bad, QUIET_NAN, values) if bad.any() else values


def _fused(a: Values, b: Values, c: Values) -> tuple[Values, Values]:
    """a * b + c in fp64, rounded to odd, from fp32: rounding it once more gives the result that was rounded once."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), np.asarray(c, np.float64)  # a product of two fp32 numbers is exact
    total = product + addend
    of_addend = total - product
    lost = (product - (total - of_addend)) + (addend - of_addend)
    is_even = (total.view(np.int64) & 1) == 0
    towards = np.where(lost > 0, np.inf, -np.inf)
    odd = np.where((lost != 0) & np.isfinite(lost) & is_even, np.nextafter(total, towards), total)
    return odd, odd.astype(np.float32)


def fma_to_nearest(a: Values, b: Values, c: Values) -> Values:
    return canonical(_fused(a, b, c)[1])


def fma_down(a: Values, b: Values, c: Values) -> Values:
    exact, nearest = _fused(a, b, c)
    return canonical(np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest))


def larger_f32(a: Values, b: Values) -> Values:
    """The number, where one of both is NaN; +0 is larger than -0."""
    result = np.fmax(a, b)
    is_zero = (a == 0) & (b == 0)
    if is_zero.any():
        result = np.where(is_zero, (a.view(np.uint32) & b.view(np.uint32)).view(np.float32), result)
    return canonical(result)


def to_bf16(values: Values) -> Values:
    """fp32 rounded to nearest, as 16 bits."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(MASK_16), rounded)


def to_f16(values: Values) -> Values:
    rounded = np.asarray(values, np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(values), np.uint32(MASK_16), rounded)


def permuted_bytes(a: Values, b: Values, selectors: Values) -> Values:
    """prmt: byte i of the result is the one of (b, a) that nibble i of the selectors names; with its highest bit, copies of the sign."""
    pair = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(np.asarray(a, np.uint32))
    for index in range(4):
        nibble = (np.asarray(selectors, np.uint32) >> np.uint32(4 * index)) & np.uint32(15)
        byte = (pair >> (np.asarray(nibble & np.uint32(7), np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * index)
    return result


def inserted_bits(inserted: Values, target: Values, start: Values, length: Values) -> Values:
    """bfi, for constant places within 32 bits."""
    at, bits = int(start), int(length)
    if at + bits > 32:
        raise ValueError(f"bfi of {bits} bits at {at} goes beyond 32 bits")
    field = np.uint32(((1 << bits) - 1) << at)
    return (target & ~field) | ((inserted << np.uint32(at)) & field)


def shifted_left(values: Values, amount: Values) -> Values:
    bits = values.dtype.itemsize * 8
    count = np.minimum(amount, bits - 1).astype(values.dtype)
    return np.where(amount >= bits, values.dtype.type(0), values << count)


def shifted_right(values: Values, amount: Values) -> Values:
    bits = values.dtype.itemsize * 8
    count = np.minimum(amount, bits - 1).astype(values.dtype)
    filled = values >> count
    return filled if values.dtype.kind == "i" else np.where(amount >= bits, values.dtype.type(0), filled)


def power_of_two(exponents: Values) -> Values:
    """ex2.approx.ftz.f32, of which only an error of 2 ulps is promised."""
    flushed = np.where(np.abs(exponents) < np.float32(2.0**-126), np.float32(0), exponents)
    result = np.exp2(flushed.astype(np.float64)).astype(np.float32)
    return canonical(np.where(np.abs(result) < np.float32(2.0**-126), np.float32(0), result))


def saturated(values: Values) -> Values:
    return np.where(np.isnan(values), np.float32(0), np.clip(values, np.float32(0), np.float32(1)))


def _wide(a: Values, b: Values) -> Values:
    dtype = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(dtype) * b.astype(dtype)


_COMPARED: dict[str, Operation] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_OPPOSITE = {"ne": "eq", "neu": "eq", "geu": "lt", "gtu": "le", "leu": "gt", "ltu": "ge"}


def compared(how: str, kind: str) -> Operation:
    """setp. Names with u are true for NaN as well. `ne` of floating point numbers would not be; no kernel has it."""
    if how in ("nan", "num"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (how == "nan")
    if how in _COMPARED:
        return _COMPARED[how]
    if (how == "ne") is (kind[0] == "f"):
        raise KeyError(f"setp.{how}.{kind}")
    opposite = _COMPARED[_OPPOSITE[how]]
    return lambda a, b: ~opposite(a, b)


def _rounded(operation: Operation) -> Operation:
    return lambda *values: canonical(operation(*values))


_FLOATS: dict[str, Operation] = {
    "add.rn.f32": _rounded(np.add),
    "sub.rn.f32": _rounded(np.subtract),
    "mul.rn.f32": _rounded(np.multiply),
    "div.rn.f32": _rounded(np.divide),
    "rcp.rn.f32": _rounded(lambda a: np.divide(np.float32(1), a)),
    "fma.rn.f32": fma_to_nearest,
    "fma.rm.f32": fma_down,
    "max.f32": larger_f32,
    "abs.f32": lambda a: (a.view(np.uint32) & ~SIGN["f32"]).view(np.float32),
    "neg.f32": lambda a: (a.view(np.uint32) ^ SIGN["f32"]).view(np.float32),
    "mul.rn.f64": np.multiply,
    "ex2.approx.ftz.f32": power_of_two,
    "cvt.sat.f32.f32": saturated,
}

_CONVERSIONS: dict[str, Operation] = {
    "cvt.f32.f16": lambda a: canonical(a.astype(np.float32)),
    "cvt.f64.f32": lambda a: a.astype(np.float64),
    "cvt.rn.f32.s32": lambda a: a.astype(np.float32),
    "cvt.rn.bf16x2.f32": lambda high, low: to_bf16(high) << np.uint32(16) | to_bf16(low),
    "cvt.rn.f16x2.f32": lambda high, low: to_f16(high) << np.uint32(16) | to_f16(low),
}

_INTEGERS: dict[str, Operation] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "mul.wide": _wide,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": shifted_left,
    "shr": shifted_right,
    "prmt": permuted_bytes,
    "bfi": inserted_bits,
}


def _chosen(a: Values, b: Values, chosen: Values) -> Values:
    return np.where(chosen, a, b)


def operation(op: str) -> tuple[Operation, tuple[str, ...]]:
    """What the instruction computes, and the types of its inputs; the last type is that of all further ones. Raises KeyError if unknown."""
    name, _, kind = op.rpartition(".")
    if op in _FLOATS:
        return _FLOATS[op], (kind,)
    if op in _CONVERSIONS:
        return _CONVERSIONS[op], (kind,)
    parts = op.split(".")
    if parts[0] == "setp" and len(parts) == 3:
        return compared(parts[1], kind), (kind,)
    if parts[0] == "selp":
        return _chosen, (kind, kind, "pred")
    if parts[0] == "cvt" and len(parts) == 3 and parts[1][0] in "us" and kind[0] in "us":
        target = DTYPES[parts[1]]
        return (lambda a: a.astype(target)), (kind,)
    if parts[0] in ("mov", "cvta"):
        return (lambda a: a), (kind,)
    if name in ("shl", "shr"):
        return _INTEGERS[name], (kind, "u32")
    if name == "bfi":
        return _INTEGERS[name], (kind, kind, "u32")
    if kind[0] == "f":
        raise KeyError(op)
    return _INTEGERS[name], (kind,)
