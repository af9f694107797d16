"""A library's kernels of the loss against fp64, within the rounding of their arithmetic. As a program, for the library it is given."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from harness.per_block import equal_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 7, 96, 5003)  # less than a chunk, a multiple of one, and more than one for each thread
FIRST, ENTRIES = 100, 10_000  # the columns are entries 100, 101, ... of this vocabulary
TOKENS = 5
THREADS = 256
GUARD = 7.0
ROUNDING = 2.0**-24  # half an ulp of fp32, relative
SUBNORMAL = 2.0**-120  # exponentials below may lose all their bits


class Case(NamedTuple):
    """Logits, and labels of which some are entries that the columns are not."""

    logits: Tensor
    labels: Tensor
    grad_loss: Tensor


class Place(NamedTuple):
    """Where rows begin, and the elements after each."""

    first: int
    gap: int


def case_of(dtype: torch.dtype, columns: int) -> Case:
    """Ordinary logits, and in three rows: falling and rising ones, those of a padded vocabulary, and steps so large that sums vanish."""
    generator = torch.Generator().manual_seed(columns)
    logits = 4 * torch.randn(TOKENS, columns, generator=generator)
    logits[1] = torch.linspace(-30, 30, columns)
    logits[2, columns // 2 + 1 :] = -math.inf
    logits[3, : columns // 3] -= 200.0
    labels = FIRST + torch.tensor([0, columns - 1, columns, columns // 2, -1])
    return Case(logits.to(dtype), labels, torch.linspace(-1, 1, TOKENS))


def placed(values: Tensor, place: Place, device: str) -> tuple[Tensor, Tensor]:
    """A storage with guards, and the rows in it that have the values."""
    tokens, columns = values.shape
    storage = torch.full((tokens, place.first + columns + place.gap), GUARD, dtype=values.dtype, device=device)
    rows = storage[:, place.first : place.first + columns]
    rows.copy_(values)
    return storage, rows


def parts_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(largest, sums, label) as the kernel has them, on the device of the logits."""
    largest, sums, label = torch.full((3, len(labels)), GUARD, device=logits.device).unbind()
    torch.ops.megatron_zpp.softmax_parts(logits, labels.to(logits.device), FIRST, ENTRIES, largest, sums, label)
    return largest, sums, label


def sum_bound(shifted: Tensor, numel: int) -> Tensor:
    """The most that a kernel's sum of exp(shifted) can be off, with `numel` logits in a chunk.

    An exponential is off by 2 ulps, and by the rounding of its exponent, twice if its thread found a larger logit later. For each chunk a
    thread adds its logits, and may multiply its sum with an exponential. Then 8 times two threads or warps add their sums, times two
    exponentials.
    """
    chunks = -(-shifted.shape[1] // (THREADS * numel))
    roundings = 4 + 2 * shifted.abs().clamp(max=1e3) + chunks * (numel + 6) + 8 * 6
    return ROUNDING * (roundings * shifted.exp()).sum(1)


def check_parts(case: Case, parts: tuple[Tensor, Tensor, Tensor]) -> None:
    largest, sums, label = (part.cpu().double() for part in parts)
    exact, columns = case.logits.double(), case.logits.shape[1]
    places = case.labels - FIRST
    is_here = (places >= 0) & (places < columns)
    assert torch.equal(largest, exact.amax(1))
    assert torch.equal(label, torch.where(is_here, exact.gather(1, places.clamp(0, columns - 1)[:, None]).squeeze(1), 0.0))
    shifted = exact - exact.amax(1, keepdim=True)
    numel = 16 // case.logits.element_size()
    assert bool(((sums - shifted.exp().sum(1)).abs() <= sum_bound(shifted, numel)).all())


def check_gradient(case: Case, largest: Tensor, sums: Tensor, gradient: Tensor) -> None:
    """The exponent is rounded, then the exponential (2 ulps), the factor, the product and the difference; then all to the dtype."""
    shifted = case.logits.double() - largest.cpu().double()[:, None]
    softmax = shifted.exp() * (case.grad_loss / sums.cpu()).double()[:, None]
    places = case.labels - FIRST
    is_label = torch.arange(case.logits.shape[1]) == places[:, None]
    of_label = torch.where(is_label, case.grad_loss.double()[:, None], 0.0)
    bound = ROUNDING * ((shifted.abs().clamp(max=1e3) + 6) * softmax.abs() + (softmax - of_label).abs())
    finest = torch.finfo(case.logits.dtype)
    bound += (finest.eps / 2 * (softmax - of_label).abs()).clamp(min=finest.smallest_normal * finest.eps) + SUBNORMAL
    assert bool(((gradient.cpu().double() - (softmax - of_label)).abs() <= 1.01 * bound).all())


def places(columns: int) -> list[Place]:
    """The second allows wide accesses and is followed by a guard, the last rules them out."""
    return [Place(0, 0), Place(8, 8 + -columns % 8), Place(1, 3)]


def check_place(case: Case, place: Place, beside: Place, device: str) -> list[Tensor]:
    """Checks logits at one place, with the gradient there and at another. Returns all results, whose bits do not depend on the places."""
    storage, rows = placed(case.logits, place, device)
    before = storage.clone()
    parts = parts_of(rows, case.labels)
    assert torch.equal(storage, before)
    check_parts(case, parts)
    largest, sums, _ = parts
    terms = (case.labels.to(device), FIRST, largest, sums, case.grad_loss.to(device))
    storage_beside, gradient = placed(torch.zeros_like(case.logits), beside, device)
    torch.ops.megatron_zpp.softmax_gradient(rows, *terms, gradient)
    check_gradient(case, largest, sums, gradient)
    torch.ops.megatron_zpp.softmax_gradient(rows, *terms, rows)
    assert torch.equal(storage, placed(gradient, place, device)[0])  # guards alike
    assert torch.equal(storage_beside, placed(gradient, beside, device)[0])
    return [*parts, gradient]


def check_odd_logits(dtype: torch.dtype, device: str) -> None:
    """NaN and +inf make a token's sum NaN and its gradient the NaN of torch; all -inf make the sum 0; other tokens keep theirs."""
    logits = torch.zeros(4, 40, dtype=dtype)
    logits[0, 17], logits[1, 39], logits[2] = math.nan, math.inf, -math.inf
    labels = torch.full((4,), FIRST, device=device)
    on_device = logits.to(device)
    largest, sums, label = parts_of(on_device, labels.cpu())
    assert sums.isnan().tolist() == [True, True, False, False] and sums[2:].tolist() == [0.0, 40.0]
    assert (sums.log() - (label - largest)).isfinite().tolist() == [False, False, False, True]
    torch.ops.megatron_zpp.softmax_gradient(on_device, labels, FIRST, largest, sums, torch.ones(4, device=device), on_device)
    assert equal_bits(on_device[:3].cpu(), torch.full((3, 40), math.nan, dtype=dtype)) and on_device[3].isfinite().all()


def cases() -> Iterator[tuple[torch.dtype, int]]:
    return product(DTYPES, COLUMNS)


def check(device: str = "cpu") -> int:
    """Raises AssertionError at the first result that is too far off, or whose bits differ from place to place. Returns the cases."""
    compared = 0
    for dtype, columns in cases():
        case = case_of(dtype, columns)
        some_places = places(columns)
        results = [check_place(case, place, some_places[index - 1], device) for index, place in enumerate(some_places)]
        for other in results[1:]:
            assert all(map(torch.equal, results[0], other)), (dtype, columns)
        compared += 1
    for dtype in DTYPES:
        check_odd_logits(dtype, device)
    return compared


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.ops.load_library(sys.argv[1])
    print(check())
