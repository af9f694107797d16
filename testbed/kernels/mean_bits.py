"""A library's mean of values that are not quantized against the reference, bit for bit. As a program, for the library it is given."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from testbed.kernels.bit_differences import Comparison, Ops, run_as_program

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RUNS = (0, 1, 7, 8, 40, 1023, 2048, 4099)  # lengths that are no multiple of 8 among them, and longer than one part of the C++ kernel
MEMBERS = (1, 2, 3, 8)
PLACES = ((0, 0), (0, 8), (1, 3), (2, 0))  # where rows begin, and how far apart they are: the last two rule out wide accesses
SLICES = 3
GUARD = 7.0


def values_of(dtype: torch.dtype, members: int, row_numel: int) -> Tensor:
    """Ordinary values [members, SLICES, row_numel], among them some that are huge, subnormal, zero, or not finite."""
    values = torch.randn(members, SLICES, row_numel, generator=torch.Generator().manual_seed(row_numel + members))
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    for place, odd in enumerate((largest, -largest, smallest, -smallest / 2, -0.0, float("nan"), float("inf"), -float("inf"))):
        values.view(-1)[3 * place + 1 :: 40] = odd
    return values.to(dtype)


def placed(values: Tensor, first: int, gap: int) -> tuple[Tensor, Tensor]:
    """A storage with guards, and the rows in it that have the values: they begin `first` elements in, `gap` elements apart."""
    *rows, row_numel = values.shape
    storage = torch.full((*rows, first + row_numel + gap), GUARD, dtype=values.dtype, device=values.device)
    part = storage[..., first : first + row_numel]
    part.copy_(values)
    return storage, part


def cases() -> Iterator[tuple[torch.dtype, torch.dtype, bool, int, int, tuple[int, int]]]:
    for number, (dtype, row_numel, members) in enumerate(product(DTYPES, RUNS, MEMBERS)):
        for stored, accumulate in ((torch.float32, False), (torch.float32, True), (dtype, False)):
            yield dtype, stored, accumulate, row_numel, members, PLACES[number % len(PLACES)]


def without_nan_bits(values: Tensor) -> Tensor:
    """A copy in which every NaN has the same bits."""
    return values.clone().masked_fill_(values.isnan(), float("nan"))


def mean(ops: Ops, values: Tensor, before: Tensor, first: int, gap: int, accumulate: bool) -> Tensor:
    """The storage, with its guards, in which the mean is written to the rows of `before`, or added."""
    _, source = placed(values, first, gap)
    storage, target = placed(before, first, gap)
    ops.mean_values(source, target, accumulate)
    return without_nan_bits(storage.cpu())


def check(comparison: Comparison) -> None:
    for dtype, stored, accumulate, row_numel, members, place in cases():
        values, before = values_of(dtype, members, row_numel), values_of(stored, 1, row_numel)[0].flip(-1)
        comparison.same("mean_values", mean, values, before, *place, accumulate)


if __name__ == "__main__":
    run_as_program(check)
