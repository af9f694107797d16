"""Results of kernels beside those of the reference: how many were compared, and where they differ."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_zpp.ops import dropout_reference, gaussian_reference, reference
from testbed.kernels.calls import Call, tensor_in_words

NAMED = 8  # differences of an op
ERROR_CHARACTERS = 100
REFERENCES = (reference, gaussian_reference, dropout_reference)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Ops = ModuleType | Any


class Comparison:
    """Compares results of ops, and goes on after one that differs or an error. A difference is a sentence.

    ops: those that are compared, on CPU tensors or on those of another device. report: is given each difference at once, until an op has
    had NAMED of them. is_fatal: whether no op can run after an error, which is raised then.
    compared: how many results were. differing: by op, how many differ.
    """

    def __init__(
        self,
        ops: Ops = torch.ops.megatron_zpp,
        device: str = "cpu",
        report: Callable[[str], object] | None = None,
        is_fatal: Callable[[Exception], bool] = lambda error: False,
    ) -> None:
        self.ops, self.device = ops, device
        self.compared = 0
        self.differing: Counter[str] = Counter()
        self.differences: list[str] = []
        self._report, self._is_fatal = report or self.differences.append, is_fatal

    def same(self, op: str, make: Callable[..., Tensor], *arguments: object, about: str = "") -> Tensor:
        """The result of `make` with the op of the reference, to which the bits of that with the ops are compared. Counts it."""
        expected = make(next(module for module in REFERENCES if hasattr(module, op)), *arguments)
        call = Call(make, arguments, about)
        self.compared += 1
        with self.going_on(op, call):
            found = make(self.ops, *(value.to(self.device) if isinstance(value, Tensor) else value for value in arguments))
            self.equal(op, found, expected, call, last=call.byte if expected.dtype == torch.uint8 else call.element)
        return expected

    @contextmanager
    def going_on(self, op: str, case: object) -> Iterator[None]:
        """An error that is raised within is a difference."""
        try:
            yield
        except Exception as error:
            if self._is_fatal(error):
                raise
            self._differ(op, case, f"{type(error).__name__}: {str(error)[:ERROR_CHARACTERS]}")

    def equal(
        self, op: str, found: Tensor, expected: Tensor, case: object, *, start: Sequence[int] = (), last: Callable[[int], str] | None = None
    ) -> None:
        """Compares bits. NaN and -0.0 count as their bits.

        start: the index of the first element, if these are parts. last: says which element, or byte, of a row a number is.
        """
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            self._differ(op, case, f"the result is {tensor_in_words(found)} instead of {tensor_in_words(expected)}")
            return
        found, expected = _bits(found.to(expected.device)), _bits(expected)
        if torch.equal(found, expected):
            return
        differs = found != expected
        index = _first(differs)
        place = _in_words([one + another for one, another in zip(index, start or [0] * len(index), strict=True)], last)
        self._differ(op, case, f"{place} is {_hexadecimal(found[index])} instead of {_hexadecimal(expected[index])}; {_share(differs)}")

    def within(self, op: str, found: Tensor, expected: Tensor, bound: Tensor, case: object) -> None:
        """Compares fp64 values. A NaN is at no distance from another, and beyond every bound from what is none."""
        is_same = (found == expected) | (found.isnan() & expected.isnan())
        is_far = ~(is_same | ((found - expected).abs() <= bound))
        if not is_far.any():
            return
        index = _first(is_far)
        numbers = [f"{values[index].item():.9g}" for values in (found, expected, bound)]
        self._differ(op, case, "{} is {} instead of {}, within {}; {}".format(_in_words(index), *numbers, _share(is_far)))

    def more(self) -> str:
        """A sentence about the differences that are not named, or nothing."""
        others = [f"{number - NAMED:,} of {op}" for op, number in self.differing.items() if number > NAMED]
        return f"more results differ: {', '.join(others)}" if others else ""

    def count(self) -> int:
        """How many results were compared. Raises AssertionError with the differences if there are any."""
        assert not self.differing, "\n".join([*self.differences, self.more()])
        return self.compared

    def _differ(self, op: str, case: object, what: str) -> None:
        self.differing[op] += 1
        if self.differing[op] <= NAMED:
            self._report(f"{op}, {case}: {what}".replace("torch.", ""))


def run_as_program(check: Callable[[Comparison], object]) -> None:
    """Prints how many results of the library that the command line names were compared, and differences on stderr, with exit code 1."""
    torch.set_num_threads(1)
    torch.ops.load_library(sys.argv[1])
    comparison = Comparison(report=lambda difference: print(difference, file=sys.stderr, flush=True))
    check(comparison)
    print(comparison.compared)
    if comparison.differing:
        sys.exit(comparison.more() or 1)


def _bits(values: Tensor) -> Tensor:
    return values.view(INTEGERS[values.element_size()])


def _first(differs: Tensor) -> tuple[int, ...]:
    """The index of the first element that is true. A byte per element is needed, and one element read, where the tensor is."""
    number = int(differs.flatten().view(torch.uint8).argmax())
    return tuple(map(int, np.unravel_index(number, differs.shape)))


def _in_words(index: Sequence[int], last: Callable[[int], str] | None = None) -> str:
    outer = [f"{name} {number:,}" for name, number in zip(("member", "row", "")[-len(index) :], index[:-1], strict=False)]
    return ", ".join([*outer, last(index[-1]) if last else f"element {index[-1]:,}"])


def _hexadecimal(number: Tensor) -> str:
    digits = 2 * number.element_size()
    return f"0x{int(number) & (1 << 4 * digits) - 1:0{digits}x}"


def _share(differs: Tensor) -> str:
    number = int(differs.count_nonzero())
    return f"{number:,} of {differs.numel():,} elements {'differs' if number == 1 else 'differ'}"
