"""An array in a file, of which only what is used is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from megatron_zpp.data.data_file import DataFile

# A smaller array is read at once: a call of the system for each of its rows would take longer. A limit, because every rank has a copy: a
# blend of thousands of corpora has tens of thousands of arrays.
HELD_BELOW_BYTES = 1 << 22


class StoredArray:
    """The array of this dtype and shape that begins at byte `offset` of the file. `array[i]` and `array[start:stop]` read these rows."""

    def __init__(self, file: DataFile, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> None:
        self.dtype = dtype
        self.shape = shape
        self._file = file
        self._offset = offset
        self._row_bytes = dtype.itemsize * math.prod(shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise IndexError(f"every row from {start} to {stop} can be read, not every {step}th")
            return self._rows(start, max(start, stop))
        row = range(len(self))[key]  # a negative key counts from the end, another wrong one raises IndexError
        return self._rows(row, row + 1)[0]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        values = self._rows(0, len(self))
        return values if dtype is None else values.astype(dtype, copy=False)

    def tolist(self) -> list[Any]:
        found: list[Any] = self[:].tolist()
        return found

    @property
    def nbytes(self) -> int:
        return len(self) * self._row_bytes

    def _rows(self, start: int, stop: int) -> np.ndarray:
        content = self._file.read(self._offset + start * self._row_bytes, (stop - start) * self._row_bytes)
        values = np.frombuffer(content, self.dtype)
        return values if len(self.shape) == 1 else values.reshape(-1, *self.shape[1:])


Rows = np.ndarray | StoredArray


def held_if_small(array: StoredArray) -> Rows:
    """The array itself, or a copy in memory if it is small."""
    return array[:] if array.nbytes < HELD_BELOW_BYTES else array
