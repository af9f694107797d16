"""Keeps indices on disk: one process builds them, all load them. The files of one set of indices:

{md5 of the description}-{class}-{split}-{..._index}.npy for each array, -checksums.json, -description.txt, .lock, .error after a failure
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from megatron_zpp.data.blended_dataset import BlendIndices
from megatron_zpp.data.build_once import SILENT, ProgressPrinter, atomic_write, built_once
from megatron_zpp.data.data_file import DataFile
from megatron_zpp.data.gpt_indices import GPTIndices
from megatron_zpp.data.stored_array import Rows, StoredArray, held_if_small
from megatron_zpp.system.outside import Members, OutsideFile, open_regular
from megatron_zpp.system.user_error import UserError

CHECKSUMS = "-checksums.json"
CUT_OFF_REMEDY = "start the run again, which builds it again."
CHECKSUM_BUFFER_BYTES = 1 << 18  # small enough to stay in the processor's cache

Indices = TypeVar("Indices", GPTIndices, BlendIndices)


@dataclass(frozen=True)
class CachedIndices(Generic[Indices]):
    indices: Indices
    message: str | None  # why the indices were not kept on disk; None if they were


class IndexCache(Generic[Indices]):
    """One set of indices in a cache folder.

    description: everything the indices depend on, and the "class" that reads them; JSON values only. Other values lead to other files.
    """

    def __init__(self, kind: type[Indices], folder: Path, split_name: str, description: Mapping[str, object]) -> None:
        self.kind: type[Indices] = kind
        self.folder = folder
        self.description = json.dumps(description, indent=4)
        digest = hashlib.md5(self.description.encode(), usedforsecurity=False).hexdigest()
        self.stem = f"{digest}-{description['class']}-{split_name}"
        self._finding: str | None = None  # why indices that are stored are not used

    def load_or_build(
        self, build: Callable[[], Indices], what: str = "indices", progress: ProgressPrinter = SILENT
    ) -> CachedIndices[Indices]:
        """The indices: from disk if the files exist and have their checksums, else from build(). Any ranks may call this, even at once."""
        unkept: list[CachedIndices[Indices]] = []

        def build_and_store() -> Indices:
            if self._finding is not None:
                progress.print_line(f"{self._finding}: {progress.name} builds {what} again")
            indices = build()
            try:
                self._store(indices)
            except OSError as error:
                unkept.append(CachedIndices(indices, self._not_kept(error)))
            return indices

        try:
            indices = built_once(self.folder / self.stem, what, self._load, build_and_store, progress)
        except OSError as error:
            return CachedIndices(build(), self._not_kept(error))
        return unkept[0] if unkept else CachedIndices(indices, None)

    def _load(self) -> Indices | None:
        self._finding = None
        description = OutsideFile(self._path("-description.txt"), str(self._path("-description.txt")))
        if description.is_missing():
            return None
        try:
            if description.text() != self.description:
                description.refuse("describes other indices than its name")
            stored = OutsideFile(self._path(CHECKSUMS), str(self._path(CHECKSUMS))).members()
            for name in self.kind._fields:
                self._verify(name, stored.members(name))
            return self.kind(*(load_array(self._array_path(name)) for name in self.kind._fields))
        except OSError as error:
            self._finding = f"{error.filename or self.folder} cannot be read ({error.strerror})"
        except (ValueError, EOFError) as error:
            self._finding = str(error)
        return None

    def _verify(self, name: str, stored: Members) -> None:
        path = self._array_path(name)
        if _checksum(path) != (stored.count("bytes"), stored.count("crc32")):
            raise UserError(f"{path} does not have its checksum")

    def _store(self, indices: Indices) -> None:
        if shutil.disk_usage(self.folder).free < sum(values.nbytes for values in indices):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # before the disk is full, which would hurt others
        for name, values in zip(self.kind._fields, indices, strict=True):
            with atomic_write(self._array_path(name)) as file:
                np.save(file, values, allow_pickle=False)
        checksums = {name: dict(zip(("bytes", "crc32"), _checksum(self._array_path(name)), strict=True)) for name in self.kind._fields}
        with atomic_write(self._path(CHECKSUMS)) as file:
            file.write(json.dumps(checksums).encode())
        # Last: its presence says that the arrays are complete.
        with atomic_write(self._path("-description.txt")) as file:
            file.write(self.description.encode())

    def _path(self, ending: str) -> Path:
        return self.folder / f"{self.stem}{ending}"

    def _array_path(self, name: str) -> Path:
        return self._path(f"-{name}_index.npy")

    def _not_kept(self, error: OSError) -> str:
        return (
            f"{self.folder} cannot be written ({error.strerror or error}): the indices of this run were built in memory and not kept; "
            "--data-cache-path names another folder."
        )


def _checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    nbytes = value = 0
    buffer = bytearray(CHECKSUM_BUFFER_BYTES)
    with open(open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(memoryview(buffer)[:count], value)
            nbytes += count
    return nbytes, value


def load_array(path: Path) -> Rows:
    """The array in an .npy file. Raises UserError if the file does not hold exactly one array, laid out row after row."""
    with open(open_regular(path), "rb") as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_by_columns, dtype = read_header(file)
        offset = file.tell()
    array = StoredArray(DataFile(str(path), CUT_OFF_REMEDY), dtype, shape, offset)
    if is_by_columns or dtype.hasobject or not shape:
        raise UserError(f"{path} does not hold rows of numbers")
    return held_if_small(array)
