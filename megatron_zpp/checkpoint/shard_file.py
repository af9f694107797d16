"""One safetensors file with a checksum for every chunk: written in one pass, read in runs of chunks that are verified on the way.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: name to dtype, shape and place), the data.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.checkpoint.manifest import CheckpointError, DamagedCheckpointError, StoredFile

HEADER_ALIGNMENT_BYTES = 8  # so that data can be mapped
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TYPE_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
_QUEUED_TENSORS = 1  # each is kept in memory until its checksum is there


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that a file is to hold. element_type: a key of DTYPES."""

    name: str
    element_type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.element_type].itemsize


@dataclass(frozen=True)
class FileLayout:
    """header: the file's first bytes, length included. offsets: of each tensor's data, from the start of the file."""

    header: bytes
    offsets: tuple[int, ...]
    nbytes: int


def lay_out(entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Where everything in a file of these tensors stands, without gaps."""
    members: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ends = [0]
    for entry in entries:
        ends.append(ends[-1] + entry.nbytes)
        members[entry.name] = {"dtype": entry.element_type, "shape": list(entry.shape), "data_offsets": ends[-2:]}
    text = json.dumps(members, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, tuple(len(header) + end for end in ends[:-1]), len(header) + ends[-1])


def write_file(path: Path, layout: FileLayout, tensors: Iterable[Tensor], chunk_bytes: int) -> StoredFile:
    """What was written, durably: `tensors` in the order and of the sizes of the layout, from any device, one at a time.

    Checksums are computed by a thread beside the writing. Raises CheckpointError where the disk refuses.
    """
    checksums = _Checksums(chunk_bytes)
    try:
        with path.open("xb", buffering=0) as file:
            _write(file, memoryview(layout.header), checksums)
            for tensor in tensors:
                _write(file, _bytes_of(tensor), checksums)
            written = file.tell()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}); free space or choose another --save") from error
    finally:
        values = checksums.finish()
    if written != layout.nbytes:
        raise RuntimeError(f"{path}: {written} bytes were written where its header says {layout.nbytes}")
    return StoredFile(path.name, written, len(layout.header), values)


class VerifiedFile:
    """A stored file open for reading. Raises DamagedCheckpointError, naming the place, for bytes that are not those written.

    bytes_read: so far, the header included.
    """

    def __init__(self, folder: Path, stored: StoredFile, chunk_bytes: int) -> None:
        self.path = folder / stored.name
        self.bytes_read = 0
        self._stored = stored
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise DamagedCheckpointError(f"{self.path} cannot be read ({error.strerror})") from error
        try:
            self._check_size_and_header()
        except BaseException:
            self.close()
            raise

    def _check_size_and_header(self) -> None:
        nbytes = os.fstat(self._descriptor).st_size
        if nbytes != self._stored.nbytes:
            raise DamagedCheckpointError(f"{self.path} has {nbytes} bytes where its manifest says {self._stored.nbytes}")
        header_chunks = -(-self._stored.header_bytes // self._chunk_bytes)
        self.read(0, min(header_chunks * self._chunk_bytes, nbytes))

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes [start, stop), both chunk boundaries or the end of the file; safe to call from several threads."""
        data = bytearray(stop - start)
        view = memoryview(data)
        filled = 0
        try:
            while filled < len(data):
                count = os.preadv(self._descriptor, [view[filled:]], start + filled)
                if count == 0:
                    raise DamagedCheckpointError(f"{self.path} ends at byte {start + filled}")
                filled += count
        except OSError as error:
            raise DamagedCheckpointError(f"{self.path} cannot be read ({error.strerror})") from error
        with self._lock:
            self.bytes_read += len(data)
        self._verify(view, start)
        return data

    def _verify(self, view: memoryview, start: int) -> None:
        for place in range(0, len(view), self._chunk_bytes):
            chunk = view[place : place + self._chunk_bytes]
            if zlib.crc32(chunk) != self._stored.checksums[(start + place) // self._chunk_bytes]:
                first = start + place
                raise DamagedCheckpointError(
                    f"{self.path} is damaged: bytes {first} to {first + len(chunk)} do not have the checksum in its manifest"
                )

    def close(self) -> None:
        os.close(self._descriptor)


class _Checksums:
    """CRC-32 of each chunk of a stream of buffers, computed by a thread of its own; zlib lets go of the interpreter meanwhile."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._buffers: queue.Queue[memoryview | None] = queue.Queue(_QUEUED_TENSORS)
        self._values: list[int] = []
        self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)
        self._thread.start()

    def add(self, buffer: memoryview) -> None:
        """Queues a buffer, which must not change until `finish` has returned."""
        self._buffers.put(buffer)

    def finish(self) -> tuple[int, ...]:
        self._buffers.put(None)
        self._thread.join()
        return tuple(self._values)

    def _run(self) -> None:
        value = filled = 0
        while (buffer := self._buffers.get()) is not None:
            place = 0
            while place < len(buffer):
                part = buffer[place : place + self._chunk_bytes - filled]
                value = zlib.crc32(part, value)
                filled += len(part)
                place += len(part)
                if filled == self._chunk_bytes:
                    self._values.append(value)
                    value = filled = 0
        if filled:
            self._values.append(value)


def _write(file: FileIO, buffer: memoryview, checksums: _Checksums) -> None:
    checksums.add(buffer)
    place = 0
    while place < len(buffer):
        place += file.write(buffer[place:])


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    values: memoryview = flat.view(torch.uint8).numpy().data
    return values
