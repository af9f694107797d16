"""The memory that kernels see: that of this process, where they may touch the tensors they were given, and the shared one of a grid block.

Every access is checked, as NVIDIA's compute-sanitizer would: its place and alignment in global memory, and in shared memory that a barrier
stands between two threads that touch a word, one of them writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_ADDRESS = 1 << 16  # no process has memory below; numpy takes an address of 0 for none
ADDRESSES = 1 << 47
NOBODY, SEVERAL = -1, -2
WORD_BYTES = 4


class AccessError(Exception):
    """A kernel did what a GPU need not do as expected, or would fault at."""


class _AllMemory:
    def __init__(self, dtype: np.dtype[Any]) -> None:
        shape = ((ADDRESSES - FIRST_ADDRESS) // dtype.itemsize,)
        self.__array_interface__ = {"shape": shape, "typestr": dtype.str, "data": (FIRST_ADDRESS, False), "version": 3}


class GlobalMemory:
    """extents: first byte and end of what may be touched."""

    def __init__(self, extents: Sequence[tuple[int, int]]) -> None:
        merged: list[list[int]] = []
        for start, end in sorted(extents):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._starts, self._ends = (np.array([extent[side] for extent in merged], np.int64) for side in (0, 1))
        self._views: dict[np.dtype[Any], NDArray[Any]] = {}

    def load(self, addresses: NDArray[np.int64], dtype: np.dtype[Any], count: int) -> list[NDArray[Any]]:
        """`count` neighbouring values for each address."""
        view, first = self._elements(addresses, dtype, count)
        return [view[first + index] for index in range(count)]

    def store(self, addresses: NDArray[np.int64], values: Sequence[NDArray[Any]]) -> None:
        view, first = self._elements(addresses, values[0].dtype, len(values))
        for index, each in enumerate(values):
            view[first + index] = each

    def _elements(self, addresses: NDArray[np.int64], dtype: np.dtype[Any], count: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        nbytes = dtype.itemsize * count
        if (addresses % nbytes).any():
            raise AccessError(f"an access of {nbytes} bytes is not aligned")
        extent = np.searchsorted(self._starts, addresses, side="right") - 1
        is_outside = (extent < 0) | (addresses + nbytes > self._ends[extent])
        if is_outside.any():
            raise AccessError(
                f"{int(is_outside.sum())} accesses of {nbytes} bytes leave the tensors, the first at {addresses[is_outside][0]:#x}"
            )
        if dtype not in self._views:
            self._views[dtype] = np.asarray(_AllMemory(dtype))
        return self._views[dtype], (addresses - FIRST_ADDRESS) // dtype.itemsize


class SharedMemory:
    """That of `blocks` grid blocks, each of `nbytes`."""

    def __init__(self, blocks: int, nbytes: int) -> None:
        words = nbytes // WORD_BYTES
        self._words = words
        self._values = np.zeros(blocks * words, np.uint32)
        self._is_written = np.zeros(blocks * words, bool)
        self._writer, self._reader = (np.full(blocks * words, NOBODY) for _ in range(2))  # since the last barrier of the block

    def barrier(self, blocks: NDArray[np.int64]) -> None:
        """All threads of these blocks have arrived."""
        for touched in (self._writer, self._reader):
            touched.reshape(-1, max(self._words, 1))[blocks if self._words else []] = NOBODY

    def load(self, threads: NDArray[np.int64], blocks: NDArray[np.int64], addresses: NDArray[np.int64]) -> NDArray[np.uint32]:
        words = self._place(blocks, addresses)
        if not self._is_written[words].all():
            raise AccessError("shared memory is read that nobody has written")
        writer = self._writer[words]
        if ((writer != NOBODY) & (writer != threads)).any():
            raise AccessError("shared memory is read that another thread has written since the last barrier")
        order = np.argsort(words, kind="stable")
        of_one = words[order]
        is_shared = np.zeros(len(words), bool)
        if len(words) > 1:
            is_same = of_one[1:] == of_one[:-1]
            is_shared[order[1:]] |= is_same
            is_shared[order[:-1]] |= is_same
        before = self._reader[words]
        self._reader[words] = np.where(is_shared | ((before != NOBODY) & (before != threads)), SEVERAL, threads)
        return self._values[words]

    def store(
        self, threads: NDArray[np.int64], blocks: NDArray[np.int64], addresses: NDArray[np.int64], values: NDArray[np.uint32]
    ) -> None:
        words = self._place(blocks, addresses)
        if len(np.unique(words)) < len(words):
            raise AccessError("threads write one word of shared memory at once")
        for touched, how in ((self._writer, "written"), (self._reader, "read")):
            before = touched[words]
            if ((before != NOBODY) & (before != threads)).any():
                raise AccessError(f"shared memory is written that another thread has {how} since the last barrier")
        self._values[words], self._writer[words], self._is_written[words] = values, threads, True

    def _place(self, blocks: NDArray[np.int64], addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        words = addresses // WORD_BYTES
        if (addresses % WORD_BYTES).any() or (words < 0).any() or (words >= self._words).any():
            raise AccessError("an access leaves shared memory, or is not aligned")
        return blocks * self._words + words
