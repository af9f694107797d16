"""One safetensors file with a checksum for every chunk, written in one pass.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: name to dtype, shape and place), the data.
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

HEADER_ALIGNMENT_BYTES = 8  # so that data can be mapped
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TYPE_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
RUN_CHUNKS = 4  # written at a time: enough to make calls cheap, few enough to be in the processor's cache for their checksums
CHECKSUM_THREADS = 2
WAITING_RUNS = 4  # tensors are kept in memory until their checksums are there
FLUSH_BYTES = 64 << 20


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
    """What was written, durably: `tensors`, or parts of them, in the order of the layout, from any device, one at a time.

    Raises CheckpointError where the disk refuses.
    """
    try:
        with path.open("xb", buffering=0) as file:
            values = _write_stream(file, _stream(layout.header, tensors), chunk_bytes)
            written = file.tell()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}); free space or choose another --save") from error
    if written != layout.nbytes:
        raise RuntimeError(f"{path}: {written} bytes were written where its header says {layout.nbytes}")
    return StoredFile(path.name, written, len(layout.header), values)


def _write_stream(file: FileIO, buffers: Iterable[memoryview], chunk_bytes: int) -> tuple[int, ...]:
    """The CRC-32 of each chunk of what has been written, durably. Threads compute them and call fsync beside the writing."""
    values: list[int] = []
    waiting: deque[Future[list[int]]] = deque()
    with ExitStack() as stack:
        flushing = _Flushing(file, stack.enter_context(ThreadPoolExecutor(1)))
        threads = stack.enter_context(ThreadPoolExecutor(CHECKSUM_THREADS))
        for run in _runs_of(buffers, RUN_CHUNKS * chunk_bytes):
            waiting.append(threads.submit(_checksums, run, chunk_bytes))
            for part in run:
                _write(file, part)
            flushing.has_written(sum(map(len, run)))
            if len(waiting) > WAITING_RUNS:
                values += waiting.popleft().result()
        flushing.finish()
        for future in waiting:
            values += future.result()
    return tuple(values)


class _Flushing:
    """Moves a file to the disk from time to time while it is being written: else the disk would rest until the end."""

    def __init__(self, file: FileIO, thread: ThreadPoolExecutor) -> None:
        self._descriptor = file.fileno()
        self._thread = thread
        self._unflushed_bytes = 0
        self._last: Future[None] | None = None

    def has_written(self, nbytes: int) -> None:
        """Raises OSError where an earlier flush failed: the system tells of a failure once."""
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


def _runs_of(buffers: Iterable[memoryview], run_bytes: int) -> Iterator[list[memoryview]]:
    """The buffers in lists that have `run_bytes` together, the last one less; a buffer may lie in several."""
    run: list[memoryview] = []
    missing_bytes = run_bytes
    for buffer in buffers:
        place = 0
        while place < len(buffer):
            part = buffer[place : place + missing_bytes]
            run.append(part)
            place += len(part)
            missing_bytes -= len(part)
            if missing_bytes == 0:
                yield run
                run, missing_bytes = [], run_bytes
    if run:
        yield run


def _checksums(run: Sequence[memoryview], chunk_bytes: int) -> list[int]:
    """The CRC-32 of each chunk of a run that begins with one; zlib lets go of the interpreter meanwhile."""
    values = []
    for chunk in _runs_of(run, chunk_bytes):
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
