"""Calls of ops, and the places in their results, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops.payload import GAUSSIAN_BLOCK_NUMEL, GAUSSIAN_SCALE_BYTES, SCALE_BYTES, padded_bytes

OF_THE_RUN = ("row_numel", "block_numel")  # named together


def tensor_in_words(values: Tensor) -> str:
    return f"{values.dtype} {list(values.shape)}"


@dataclass(frozen=True)
class Call:
    """A function of ops that makes a result, and what follows the ops.

    The names of its parameters say where in the result something is. A run has `row_numel` values, or those of a row of `values`. It begins
    `first` elements in. `block_numel` of its values share a scale, or 256 if there are `rounds`, which Gaussian codes have. Codes have
    `next_bits` or `bits`.
    """

    make: Callable[..., Tensor]
    arguments: tuple[object, ...]
    about: str  # what the arguments do not say

    def __str__(self) -> str:
        return ", ".join([*self._words(), *([self.about] if self.about else [])])

    def element(self, number: int) -> str:
        """Element `number` of a row of values, counted from the first of the run."""
        element = number - self._given.get("first", 0)
        if not 0 <= element < self._row_numel:
            return f"element {element} beside the run"
        return f"element {element} in block {element // self._block_numel}" if self._block_numel else f"element {element}"

    def byte(self, number: int) -> str:
        """Byte `number` of a row of payloads."""
        blocks, bits = self._row_numel // self._block_numel, self._given.get("next_bits", self._given["bits"])
        codes = ("codes", self._row_numel * bits // 8)
        scales = ("scale", blocks * (GAUSSIAN_SCALE_BYTES if self._is_gaussian else SCALE_BYTES))
        start = 0
        for name, part_bytes in (scales, codes) if self._is_gaussian else (codes, scales):
            if start <= number < start + part_bytes:
                return f"byte {number} in the {name} of block {(number - start) * blocks // part_bytes}"
            start += padded_bytes(part_bytes)
        return f"byte {number} beside codes and scales"

    @property
    def _given(self) -> dict[str, Any]:
        return dict(signature(self.make).bind(None, *self.arguments).arguments)

    @property
    def _is_gaussian(self) -> bool:
        return "rounds" in self._given

    @property
    def _row_numel(self) -> int:
        return self._given["row_numel"] if "row_numel" in self._given else self._given["values"].shape[-1]

    @property
    def _block_numel(self) -> int:
        """0 without blocks."""
        return GAUSSIAN_BLOCK_NUMEL if self._is_gaussian else self._given.get("block_numel", 0)

    def _words(self) -> Iterator[str]:
        for name, value in list(self._given.items())[1:]:
            words = name.replace("_", " ")
            if isinstance(value, Tensor):
                yield f"{words} {list(value.shape) if value.dtype == torch.uint8 else tensor_in_words(value)}"
            elif isinstance(value, torch.dtype):
                yield f"to {value}"
            elif value is True:
                yield words
            elif value is not None and value is not False and name not in OF_THE_RUN:
                yield f"{words} {value:.6g}" if isinstance(value, float) else f"{words} {value}"
        if self._block_numel:
            yield f"{self._row_numel // self._block_numel} blocks of {self._block_numel}"
