"""A library's kernel of dropout against the reference, bit for bit. As a program, for the library it is given."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from testbed.kernels.bit_differences import Comparison, Ops, run_as_program

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 2, 7, 8, 31, 3 * 7 * 11, 1023, 1025, 5000)  # channels that are no multiple of 8 among them
# Indices that are small, that pass a multiple of 2^32 within most sizes and at their very end, and that no tensor here reaches.
FIRST_INDICES = (0, 3, 2**32 - 5, 2**32 - 8, 7 * 2**32 - 1024, 7 * 2**32 - 1025, 2**48 + 1, 2**63 - 2**13)
THRESHOLDS = ((0, 1.0), (429496730, 1 / 0.9), (2**31, 2.0), (2**32 - 1, 2.0**32))
PLACES = (0, 1, 3)  # of the first value in its storage: all but 0 rule out wide accesses
GUARD = 7.0


def values_of(dtype: torch.dtype, numel: int) -> Tensor:
    """Ordinary values, among them some that are huge, subnormal, zero, or not finite."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    for place, odd in enumerate((largest, -largest, smallest, -smallest / 2, -0.0, float("nan"), float("inf"), -float("inf"))):
        values[3 * place + 1 :: 40] = odd
    return values.to(dtype)


def guarded(values: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """A storage with guards, and the part of it between them, which has the values."""
    storage = torch.full((place + values.numel() + 3,), GUARD, dtype=values.dtype, device=values.device)
    part = storage[place : place + values.numel()]
    part.copy_(values)
    return storage, part


def cases() -> Iterator[tuple[torch.dtype, int, int, int, float, int, int]]:
    for number, (dtype, numel, first) in enumerate(product(DTYPES, SIZES, FIRST_INDICES)):
        threshold, scale = THRESHOLDS[number % len(THRESHOLDS)]
        yield dtype, numel, first, threshold, scale, PLACES[number % 3], PLACES[number // 3 % 3]


def dropped(ops: Ops, values: Tensor, source_first: int, first: int, key: int, first_index: int, threshold: int, scale: float) -> Tensor:
    """The storage, with its guards, in which the dropped values begin `first` elements in."""
    _, source = guarded(values, source_first)
    storage, target = guarded(torch.zeros_like(values), first)
    ops.drop_values(source, target, key, first_index, threshold, scale)
    return storage


def check(comparison: Comparison) -> None:
    for dtype, numel, first_index, threshold, scale, source_place, target_place in cases():
        given = (2**63 - 1 - numel, first_index, threshold, scale)
        comparison.same("drop_values", dropped, values_of(dtype, numel), source_place, target_place, *given)


if __name__ == "__main__":
    run_as_program(check)
