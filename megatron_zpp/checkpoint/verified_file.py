"""Reads a stored file in ranges of chunks and verifies their checksums."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megatron_zpp.checkpoint.manifest import DamagedCheckpointError, StoredFile
from megatron_zpp.checkpoint.reshard import ByteRange
from megatron_zpp.system.outside import open_regular

CHUNKS_AT_ONCE = 4  # read at a time: enough to make calls cheap, few enough to stay in the processor's cache until they are used
VERIFYING_THREADS = 2
BUFFERS = 4  # one is filled while the others are verified or wait for it


class VerifiedFile:
    """A stored file open for reading. bytes_read: so far, with the header.

    Raises DamagedCheckpointError, naming the place, for bytes that differ from those that were written.
    """

    def __init__(self, folder: Path, stored: StoredFile, chunk_bytes: int) -> None:
        self.path = folder / stored.name
        self.bytes_read = 0
        self._stored = stored
        self._chunk_bytes = chunk_bytes
        self._descriptor = _opened(self.path)
        try:
            self._check_size_and_header()
        except BaseException:
            self.close()
            raise

    def _check_size_and_header(self) -> None:
        nbytes = os.fstat(self._descriptor).st_size
        if nbytes != self._stored.nbytes:
            raise DamagedCheckpointError(f"{self.path} has {nbytes} bytes, its manifest says {self._stored.nbytes}")
        header_chunks = -(-self._stored.header_bytes // self._chunk_bytes)
        self.read(0, min(header_chunks * self._chunk_bytes, nbytes))

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes [start, stop). Both are chunk boundaries, except that stop may be the end of the file."""
        data = bytearray(stop - start)
        view = memoryview(data)
        self._read_into(view, start)
        verify(view, start, self._stored, self._chunk_bytes, str(self.path))
        return data

    def for_each_range(self, ranges: Iterable[ByteRange], use: Callable[[memoryview, int], None]) -> None:
        """Calls use(bytes, start) for each range, in any order. `use` must not keep the bytes: their buffer is filled again.

        ranges: of at most CHUNKS_AT_ONCE chunks each. One thread reads them in order, which suits disks; others verify and call `use`.
        """
        used: deque[tuple[bytearray, Future[None]]] = deque()
        buffer_bytes = min(CHUNKS_AT_ONCE * self._chunk_bytes, self._stored.nbytes)

        def verify_and_use(view: memoryview, start: int) -> None:
            verify(view, start, self._stored, self._chunk_bytes, str(self.path))
            use(view, start)

        with ThreadPoolExecutor(VERIFYING_THREADS) as threads:
            for chunks in ranges:
                if len(used) < BUFFERS:
                    buffer = bytearray(buffer_bytes)
                else:
                    buffer, future = used.popleft()
                    future.result()
                view = memoryview(buffer)[: chunks.nbytes]
                self._read_into(view, chunks.start)
                used.append((buffer, threads.submit(verify_and_use, view, chunks.start)))
            for _, future in used:
                future.result()

    def _read_into(self, view: memoryview, start: int) -> None:
        _read_into(self._descriptor, view, start, self.path)
        self.bytes_read += len(view)

    def close(self) -> None:
        os.close(self._descriptor)


def read_unverified(path: Path, view: memoryview, start: int) -> None:
    """Fills the view with bytes of a file, for another rank that verifies them. Raises DamagedCheckpointError if they cannot be read."""
    descriptor = _opened(path)
    try:
        _read_into(descriptor, view, start, path)
    finally:
        os.close(descriptor)


def verify(view: memoryview, start: int, stored: StoredFile, chunk_bytes: int, name: str) -> None:
    """Raises DamagedCheckpointError if bytes of a file differ from those that were written. start: where they begin, a chunk boundary."""
    for place in range(0, len(view), chunk_bytes):
        chunk = view[place : place + chunk_bytes]
        if zlib.crc32(chunk) != stored.checksums[(start + place) // chunk_bytes]:
            first = start + place
            raise DamagedCheckpointError(
                f"{name} is damaged: bytes {first} to {first + len(chunk)} do not have the checksum in its manifest"
            )


def _opened(path: Path) -> int:
    try:
        return open_regular(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror})") from error


def _read_into(descriptor: int, view: memoryview, start: int, path: Path) -> None:
    filled = 0
    try:
        while filled < len(view):
            count = os.preadv(descriptor, [view[filled:]], start + filled)
            if count == 0:
                raise DamagedCheckpointError(f"{path} ends at byte {start + filled}")
            filled += count
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror})") from error
