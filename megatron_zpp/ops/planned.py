"""Takes the place of the kernels on tensors of a plan, which have no values: tells who listens how many values are encoded or decoded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class CodecWork:
    """Numbers of values of one call.

    encoded, decoded: in integers. summed: values that are decoded to take a mean over several members; a mean of n values over m members
    counts n x m. gaussian_encoded, gaussian_decoded: in Gaussian codes; every member of a mean is decoded by itself. rotated: the same
    values, once for each round of their rotation. subtracted: values from which a kept copy is subtracted before they are encoded.
    """

    encoded: int = 0
    decoded: int = 0
    summed: int = 0
    gaussian_encoded: int = 0
    gaussian_decoded: int = 0
    rotated: int = 0
    subtracted: int = 0

    @property
    def encodes(self) -> bool:
        """Whether any value is encoded."""
        return self.encoded + self.gaussian_encoded > 0

    def __add__(self, other: CodecWork) -> CodecWork:
        return CodecWork(*map(operator.add, vars(self).values(), vars(other).values()))


Listener = Callable[[CodecWork], None]
_listener: Listener | None = None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside the block, `listener` is told of every call. One thread plans at a time."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def encode_blocks(values: Tensor, payloads: Tensor, *options: Any) -> None:
    _tell(encoded=values.numel())


def decode_blocks(payloads: Tensor, values: Tensor, *options: Any) -> None:
    _tell(decoded=values.numel())


def decode_mean_blocks(payloads: Tensor, mean: Tensor, *options: Any) -> None:
    _tell(summed=payloads.shape[0] * mean.numel())


def recode_mean_blocks(payloads: Tensor, recoded: Tensor, row_numel: int, *options: Any) -> None:
    members, slices = payloads.shape[:2]
    _tell(summed=members * slices * row_numel, encoded=slices * row_numel)


def mean_values(members: Tensor, mean: Tensor, accumulate: bool) -> None:
    """Casting and copying are not counted."""


def encode_gaussian(values: Tensor, payloads: Tensor, bits: int, rounds: int, key: int) -> None:
    _tell(gaussian_encoded=values.numel(), rotated=rounds * values.numel())


def decode_gaussian(payloads: Tensor, values: Tensor, bits: int, rounds: int, keys: Sequence[int], accumulate: bool) -> None:
    _tell(gaussian_decoded=values.numel(), rotated=rounds * values.numel())


def decode_mean_gaussian(payloads: Tensor, mean: Tensor, bits: int, rounds: int, keys: Sequence[int], accumulate: bool) -> None:
    decoded = payloads.shape[0] * mean.numel()
    _tell(gaussian_decoded=decoded, rotated=rounds * decoded)


def softmax_parts(*arguments: Any) -> None:
    """The loss is part of the computation of the last use."""


def softmax_gradient(*arguments: Any) -> None:
    """The loss is part of the computation of the last use."""


def _tell(**counts: int) -> None:
    if _listener is not None:
        _listener(CodecWork(**counts))
