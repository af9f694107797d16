"""Reads a file of torch.save, in its form of today (zip) or of before torch 1.6, without unpickling it: records, and tensors one at a time.

A tensor in the pickle is a request to rebuild it from a storage, which is bytes of the file. Only requests for plain tensors are followed,
by the code here; all else stays a record.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_zpp.checkpoint.megatron.pickled import Global, Made, Outside, Pickled, PickleError, read_pickle
from megatron_zpp.checkpoint.megatron.torch_zip import Bytes, is_zip, zip_members
from megatron_zpp.checkpoint.megatron.window import Window
from megatron_zpp.system.outside import WHOLE_NUMBER_LIMIT
from megatron_zpp.system.user_error import UserError

OLD_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a file of before torch 1.6
OLD_VERSION = 1001  # the second
MOST_PICKLE_BYTES = 1 << 28
LITTLE = b"little"  # the byte order that is read
MOST_DIMENSIONS = 8
NUMEL_BYTES = 8  # before each storage of an old file
DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}
ELEMENT_BYTES = {
    **{name: dtype.itemsize for name, dtype in DTYPES.items()},
    "LongStorage": 8,
    "IntStorage": 4,
    "ShortStorage": 2,
    "CharStorage": 1,
    "ByteStorage": 1,
    "BoolStorage": 1,
}
REBUILD = "torch._utils._rebuild_tensor_v2"
REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
REBUILD_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"  # of a tensor on which Python attributes were set
PLAIN_TENSOR = "torch.Tensor"
SIZE = "torch.Size"
NOT_READ = "is not in fp16, bf16, fp32 or fp64, so it cannot be imported"  # of a tensor of other elements


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file: element (i, j) of the tensor is element start + i strides[0] + j strides[1] of the storage."""

    storage: str
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """Elements of the storage from the first of the tensor to its last."""
        if math.prod(self.shape) == 0:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))


class TorchFile:
    """A file of torch.save. root: the record of the object that was saved.

    Raises UserError, naming the file, for a file that torch does not write.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.root, self._storages = self._read_zip() if is_zip(window) else self._read_old()

    def place_of(self, record: Any) -> TensorPlace | None:
        """Where the tensor of a record is; None if the record is no tensor of floating-point numbers.

        Raises UserError for a tensor that does not fit into its storage.
        """
        if isinstance(record, Made) and record.is_made_by(REBUILD_PARAMETER) and isinstance(record.arguments, tuple):
            record = record.arguments[0] if record.arguments else None
        record = _without_attributes(record)
        if not isinstance(record, Made) or not record.is_made_by(REBUILD):
            return None
        if not isinstance(record.arguments, tuple) or len(record.arguments) < 4:
            self._refuse("has a tensor without a storage")
        outside, start, shape, strides = record.arguments[:4]
        kind, storage, storage_numel = self._storage(outside)
        if kind not in DTYPES:
            return None
        place = TensorPlace(storage, DTYPES[kind], self._counts((start,))[0], self._counts(shape), self._counts(strides))
        self._check(place, storage_numel)
        return place

    def read(self, place: TensorPlace) -> Tensor:
        """The elements of a tensor, in its own dtype. Raises UserError if the file ends before them."""
        if place.span == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        element_bytes = place.dtype.itemsize
        data = self.window.read_at(self._storages[place.storage].start + place.start * element_bytes, place.span * element_bytes)
        return torch.frombuffer(data, dtype=place.dtype).as_strided(place.shape, place.strides)

    def _storage(self, outside: Any) -> tuple[str, str, int]:
        """The kind of a storage, its name, and its number of elements."""
        identity = outside.identity if isinstance(outside, Outside) else None
        fields = identity if isinstance(identity, tuple) else ()
        is_view = len(fields) == 6 and fields[5] is not None
        if len(fields) in (5, 6) and not is_view and isinstance(fields[1], Global) and fields[1].module == "torch":
            key, numel = fields[2], fields[4]
            if type(key) is str and counts_of((numel,)) is not None:
                return fields[1].name, key, numel
        return self._refuse("has a tensor in a storage that this program does not read")

    def _check(self, place: TensorPlace, storage_numel: int) -> None:
        nbytes = self._storages[place.storage].nbytes if place.storage in self._storages else 0
        shape = "x".join(map(str, place.shape))
        if nbytes < storage_numel * place.dtype.itemsize:
            self._refuse(f"has {nbytes} bytes for a tensor of shape {shape}, whose storage has {storage_numel} elements")
        if len(place.shape) != len(place.strides) or place.start + place.span > storage_numel:
            self._refuse(f"has a tensor of shape {shape} that reaches beyond its storage of {storage_numel} elements")
        if math.prod(place.shape) > place.span:
            self._refuse(f"has a tensor of shape {shape} whose elements overlap")

    def _counts(self, record: Any) -> tuple[int, ...]:
        values = counts_of(record)
        if values is None:
            self._refuse("has a tensor without a shape")
        return values

    def _read_zip(self) -> tuple[Any, Mapping[str, Bytes]]:
        members = zip_members(self.window)
        if "data.pkl" not in members:
            self._refuse("is a zip file that torch.save has not written")
        order = members.get("byteorder")
        if order is not None and (order.nbytes != len(LITTLE) or self.window.read_at(order.start, order.nbytes) != LITTLE):
            self._refuse("has numbers with their highest byte first")
        start, nbytes = members["data.pkl"]
        if nbytes > MOST_PICKLE_BYTES:
            self._refuse(f"has a pickle of {nbytes} bytes, more than {MOST_PICKLE_BYTES}")
        root = self._pickle(io.BytesIO(self.window.read_at(start, nbytes))).root
        return root, {name.removeprefix("data/"): place for name, place in members.items() if name.startswith("data/")}

    def _read_old(self) -> tuple[Any, Mapping[str, Bytes]]:
        file = io.BytesIO(self.window.read_at(0, min(self.window.nbytes, MOST_PICKLE_BYTES)))
        beginning = [self._pickle(file).root for _ in (OLD_MAGIC, OLD_VERSION)]
        if beginning != [OLD_MAGIC, OLD_VERSION]:
            self._refuse("is not a file of torch.save")
        self._pickle(file)  # sizes of numbers on the machine that wrote it
        saved, keys = self._pickle(file), self._pickle(file).root
        kinds = {key: kind for kind, key, _ in map(self._storage, saved.outside)}
        if not isinstance(keys, list) or not all(type(key) is str and kinds.get(key) in ELEMENT_BYTES for key in keys):
            self._refuse("has storages that this program does not read")
        storages: dict[str, Bytes] = {}
        position = file.tell()
        for key in keys:
            numel = int.from_bytes(self.window.read_at(position, NUMEL_BYTES), "little")
            storages[key] = Bytes(position + NUMEL_BYTES, numel * ELEMENT_BYTES[kinds[key]])
            position = sum(storages[key])
        if position > self.window.nbytes:
            self._refuse("ends before its last storage does")
        return saved.root, storages

    def _pickle(self, file: io.BytesIO) -> Pickled:
        try:
            return read_pickle(file)
        except PickleError as error:
            self._refuse(str(error))

    def _refuse(self, finding: str) -> NoReturn:
        raise UserError(f"{self.window.name} {finding}; choose a file that Megatron has written.") from None


def _without_attributes(record: Any) -> Any:
    """The record of a plain tensor in place of the record of the same tensor with attributes; any other record as it is."""
    if not isinstance(record, Made) or not record.is_made_by(REBUILD_WITH_ATTRIBUTES) or not isinstance(record.arguments, tuple):
        return record
    by, kind, arguments = record.arguments[:3] if len(record.arguments) >= 3 else (None, None, None)
    is_plain = isinstance(kind, Global) and str(kind) == PLAIN_TENSOR
    return Made(by, arguments) if is_plain else record


def counts_of(record: Any) -> tuple[int, ...] | None:
    """The numbers of a shape, or None if the record is no tuple of a few whole numbers from 0."""
    if isinstance(record, Made) and record.is_made_by(SIZE) and isinstance(record.arguments, tuple) and len(record.arguments) == 1:
        record = record.arguments[0]
    if not isinstance(record, tuple) or len(record) > MOST_DIMENSIONS:
        return None
    return record if all(type(value) is int and 0 <= value < WHOLE_NUMBER_LIMIT for value in record) else None
