"""A library's kernels of the loss against fp64, within the rounding of their arithmetic. As a program, for the library it is given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.kernels.bit_differences import Comparison, Ops, run_as_program
from testbed.kernels.mean_bits import without_nan_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 7, 96, 5003)  # less than a chunk, a multiple of one, and more than one for each thread
FIRST, ENTRIES = 100, 10_000  # the columns are entries 100, 101, ... of this vocabulary
TOKENS = 5
THREADS = 256
GUARD = 7.0
RESULTS = {"largest": "softmax_parts", "sums": "softmax_parts", "label": "softmax_parts", "gradient": "softmax_gradient"}
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


def placed(values: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """A storage with guards, and the rows in it that have the values."""
    tokens, columns = values.shape
    storage = torch.full((tokens, place.first + columns + place.gap), GUARD, dtype=values.dtype, device=values.device)
    rows = storage[:, place.first : place.first + columns]
    rows.copy_(values)
    return storage, rows


def parts_of(ops: Ops, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(largest, sums, label) as the kernel has them, on the device of the logits."""
    largest, sums, label = torch.full((3, len(labels)), GUARD, device=logits.device).unbind()
    ops.softmax_parts(logits, labels.to(logits.device), FIRST, ENTRIES, largest, sums, label)
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


def check_parts(comparison: Comparison, case: Case, parts: Sequence[Tensor], words: str) -> None:
    largest, sums, label = (part.cpu().double() for part in parts)
    exact, columns = case.logits.double(), case.logits.shape[1]
    places = case.labels - FIRST
    is_here = (places >= 0) & (places < columns)
    of_label = torch.where(is_here, exact.gather(1, places.clamp(0, columns - 1)[:, None]).squeeze(1), 0.0)
    shifted = exact - exact.amax(1, keepdim=True)
    numel = 16 // case.logits.element_size()
    no_error = torch.zeros(TOKENS, dtype=torch.float64)
    comparison.within("softmax_parts", largest, exact.amax(1), no_error, f"largest of {words}")
    comparison.within("softmax_parts", label, of_label, no_error, f"label of {words}")
    comparison.within("softmax_parts", sums, shifted.exp().sum(1), sum_bound(shifted, numel), f"sums of {words}")


def check_gradient(comparison: Comparison, case: Case, parts: Sequence[Tensor], gradient: Tensor, words: str) -> None:
    """The exponent is rounded, then the exponential (2 ulps), the factor, the product and the difference; then all to the dtype."""
    largest, sums = (part.cpu() for part in parts[:2])
    shifted = case.logits.double() - largest.double()[:, None]
    softmax = shifted.exp() * (case.grad_loss / sums).double()[:, None]
    places = case.labels - FIRST
    is_label = torch.arange(case.logits.shape[1]) == places[:, None]
    of_label = torch.where(is_label, case.grad_loss.double()[:, None], 0.0)
    bound = ROUNDING * ((shifted.abs().clamp(max=1e3) + 6) * softmax.abs() + (softmax - of_label).abs())
    finest = torch.finfo(case.logits.dtype)
    bound += (finest.eps / 2 * (softmax - of_label).abs()).clamp(min=finest.smallest_normal * finest.eps) + SUBNORMAL
    comparison.within("softmax_gradient", gradient.cpu().double(), softmax - of_label, 1.01 * bound, f"gradient of {words}")


def places(columns: int) -> list[Place]:
    """The second allows wide accesses and is followed by a guard, the last rules them out."""
    return [Place(0, 0), Place(8, 8 + -columns % 8), Place(1, 3)]


def check_place(comparison: Comparison, case: Case, place: Place, beside: Place) -> list[Tensor]:
    """Checks logits at one place, with the gradient there and at another. Returns all results, whose bits do not depend on the places."""
    ops, device, words = comparison.ops, comparison.device, words_of(case, place)
    storage, rows = placed(case.logits.to(device), place)
    before = storage.clone()
    parts = parts_of(ops, rows, case.labels)
    comparison.equal("softmax_parts", storage, before, f"logits, which it only reads, of {words}")
    check_parts(comparison, case, parts, words)
    largest, sums, _ = parts
    terms = (case.labels.to(device), FIRST, largest, sums, case.grad_loss.to(device))
    storage_beside, gradient = placed(torch.zeros_like(rows), beside)
    ops.softmax_gradient(rows, *terms, gradient)
    check_gradient(comparison, case, parts, gradient, words)
    ops.softmax_gradient(rows, *terms, rows)
    comparison.equal("softmax_gradient", storage, placed(gradient, place)[0], f"storage of {words}, over which it writes")
    words_beside = f"storage of the gradient, first {beside.first}, gap {beside.gap}, of {words}"
    comparison.equal("softmax_gradient", storage_beside, placed(gradient, beside)[0], words_beside)
    return [*parts, gradient]


def words_of(case: Case, place: Place) -> str:
    dtype, (tokens, columns) = case.logits.dtype, case.logits.shape
    return f"{dtype} logits [{tokens}, {columns}], first {place.first}, gap {place.gap}"


def check_odd_logits(comparison: Comparison, dtype: torch.dtype) -> None:
    """NaN and +inf make a token's sum NaN and its gradient the NaN of torch; all -inf make the sum 0; other tokens keep theirs."""
    ops, device, words = comparison.ops, comparison.device, f"{dtype} logits with NaN, inf and -inf alone"
    logits = torch.zeros(4, 40, dtype=dtype)
    logits[0, 17], logits[1, 39], logits[2] = math.nan, math.inf, -math.inf
    labels = torch.full((4,), FIRST, device=device)
    on_device = logits.to(device)
    largest, sums, label = parts_of(ops, on_device, labels)
    expected = torch.tensor([math.nan, math.nan, 0.0, 40.0])
    comparison.equal("softmax_parts", without_nan_bits(sums.cpu()), expected, f"sums of {words}")
    is_finite = (sums.log() - (label - largest)).isfinite().cpu()
    comparison.equal("softmax_parts", is_finite, torch.tensor([False, False, False, True]), f"whether losses are finite of {words}")
    ops.softmax_gradient(on_device, labels, FIRST, largest, sums, torch.ones(4, device=device), on_device)
    gradient = on_device.cpu()
    comparison.equal("softmax_gradient", gradient[:3], torch.full((3, 40), math.nan, dtype=dtype), f"gradient of {words}")
    finite = torch.ones(40, dtype=torch.bool)
    comparison.equal("softmax_gradient", gradient[3].isfinite(), finite, f"whether the last gradient is finite of {words}")


def cases() -> Iterator[tuple[torch.dtype, int]]:
    return product(DTYPES, COLUMNS)


def check_case(comparison: Comparison, case: Case) -> None:
    """Checks logits at each place, and that all results have the same bits there."""
    some_places = places(case.logits.shape[1])
    results = [check_place(comparison, case, place, some_places[index - 1]) for index, place in enumerate(some_places)]
    for place, other in zip(some_places[1:], results[1:], strict=True):
        for (name, op), own, first in zip(RESULTS.items(), other, results[0], strict=True):
            comparison.equal(op, own, first, f"{name}, of which the first place has other bits, of {words_of(case, place)}")


def check(comparison: Comparison) -> None:
    """Compares results with fp64, and from place to place. Counts a case once."""
    for dtype, columns in cases():
        case = case_of(dtype, columns)
        comparison.compared += 1
        with comparison.going_on("the loss", words_of(case, Place(0, 0))):
            check_case(comparison, case)
    for dtype in DTYPES:
        with comparison.going_on("the loss", f"odd {dtype} logits"):
            check_odd_logits(comparison, dtype)


if __name__ == "__main__":
    run_as_program(check)
