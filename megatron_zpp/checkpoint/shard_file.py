"""Writes one safetensors file in one pass, with a checksum for every chunk.

A safetensors file consists of the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and place of every
tensor by name) and the data.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.checkpoint.manifest import CheckpointError, StoredFile

HEADER_ALIGNMENT_BYTES = 8  # so that the data can be memory-mapped
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
ELEMENT_TYPES = {dtype: name for name, dtype in DTYPES.items()}
CHUNKS_AT_ONCE = 4  # written at a time: enough to make calls cheap, few enough to stay in the processor's cache for their checksums
CHECKSUM_THREADS = 2
WAITING_BATCHES = 4  # batches that wait for their checksums; their tensors stay in memory
FLUSH_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write into a file. element_type: a key of DTYPES."""

    name: str
    element_type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.element_type].itemsize


@dataclass(frozen=True)
class FileLayout:
    """header: the first bytes of the file, with the length. offsets: where the data of each tensor begins, from the start of the file."""

    header: bytes
    offsets: tuple[int, ...]
    nbytes: int


def lay_out(entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """The layout of a file of these tensors, without gaps."""
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
    """Writes the file durably and returns its description.

    tensors: all tensors, or parts of them, in the order of the layout, on any device; only a few are in memory at a time.
    Raises CheckpointError if the file cannot be written.
    """
    try:
        with path.open("xb", buffering=0) as file:
            values = _write_stream(file, _stream(layout.header, tensors), chunk_bytes)
            written = file.tell()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}); free space or choose another folder") from error
    if written != layout.nbytes:
        raise RuntimeError(f"{path}: {written} bytes were written, its header says {layout.nbytes}")
    return StoredFile(path.name, written, len(layout.header), values)


def write_bytes(path: Path, data: bytes, chunk_bytes: int) -> StoredFile:
    """Writes the bytes of a whole safetensors file. Durable, and with errors, as `write_file`."""
    return write_file(path, FileLayout(data, (), len(data)), (), chunk_bytes)


def _write_stream(file: FileIO, buffers: Iterable[memoryview], chunk_bytes: int) -> tuple[int, ...]:
    """Writes the buffers durably and returns the CRC-32 of each chunk. Threads compute the CRCs and call fsync during the writing."""
    values: list[int] = []
    waiting: deque[Future[list[int]]] = deque()
    with ExitStack() as stack:
        flusher = _Flusher(file, stack.enter_context(ThreadPoolExecutor(1)))
        threads = stack.enter_context(ThreadPoolExecutor(CHECKSUM_THREADS))
        for batch in _batches_of(buffers, CHUNKS_AT_ONCE * chunk_bytes):
            waiting.append(threads.submit(_checksums, batch, chunk_bytes))
            for part in batch:
                _write(file, part)
            flusher.count_written(sum(map(len, batch)))
            if len(waiting) > WAITING_BATCHES:
                values += waiting.popleft().result()
        flusher.finish()
        for future in waiting:
            values += future.result()
    return tuple(values)


class _Flusher:
    """Calls fsync from time to time while a file is being written, so that the disk works all the time and not only at the end."""

    def __init__(self, file: FileIO, thread: ThreadPoolExecutor) -> None:
        self._descriptor = file.fileno()
        self._thread = thread
        self._unflushed_bytes = 0
        self._last: Future[None] | None = None

    def count_written(self, nbytes: int) -> None:
        """Counts bytes and starts a flush when enough are written.

        Raises OSError if an earlier flush failed, because the system reports a failure only once.
        """
        self._unflushed_bytes += nbytes
        if self._unflushed_bytes < FLUSH_BYTES or not (self._last is None or self._last.done()):
            return
        self._wait()
        self._unflushed_bytes = 0
        self._last = self._thread.submit(os.fsync, self._descriptor)

    def finish(self) -> None:
        self._wait()
        os.fsync(self._descriptor)

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()


def _stream(header: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    yield from map(_bytes_of, tensors)


def _batches_of(buffers: Iterable[memoryview], batch_bytes: int) -> Iterator[list[memoryview]]:
    """The buffers in lists of `batch_bytes` each; only the last list may have fewer. A buffer may be divided among several lists."""
    batch: list[memoryview] = []
    missing_bytes = batch_bytes
    for buffer in buffers:
        place = 0
        while place < len(buffer):
            part = buffer[place : place + missing_bytes]
            batch.append(part)
            place += len(part)
            missing_bytes -= len(part)
            if missing_bytes == 0:
                yield batch
                batch, missing_bytes = [], batch_bytes
    if batch:
        yield batch


def _checksums(batch: Sequence[memoryview], chunk_bytes: int) -> list[int]:
    """The CRC-32 of each chunk of a batch that begins with a chunk. zlib releases the interpreter lock while it computes."""
    values = []
    for chunk in _batches_of(batch, chunk_bytes):
        value = 0
        for part in chunk:
            value = zlib.crc32(part, value)
        values.append(value)
    return values


def _write(file: FileIO, buffer: memoryview) -> None:
    place = 0
    while place < len(buffer):
        place += file.write(buffer[place:])


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    values: memoryview = flat.view(torch.uint8).numpy().data
    return values
