"""A file, or a range of its bytes, from outside this program: read at any place, never beyond its end."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_zpp.system.outside import open_regular
from megatron_zpp.system.user_error import UserError


class Window(io.RawIOBase):
    """A part of a regular file, which is open only while it is read: a checkpoint may have thousands of files.

    name: how messages call it. nbytes: None for all bytes from `start`.
    Raises UserError, naming the file, if it cannot be opened or does not have these bytes.
    """

    def __init__(self, path: Path, start: int = 0, nbytes: int | None = None) -> None:
        super().__init__()
        self.name = str(path)
        self._path, self._start, self._position = path, start, 0
        with self._opened() as descriptor:
            file_bytes = os.fstat(descriptor).st_size
        self.nbytes = file_bytes - start if nbytes is None else nbytes
        if not 0 <= start <= start + self.nbytes <= file_bytes:
            raise UserError(f"{path} has {file_bytes} bytes, and {start + self.nbytes} are needed: it is incomplete; copy it again.")

    def read_at(self, offset: int, nbytes: int) -> bytearray:
        """These bytes. Raises UserError unless all are in the window."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise UserError(f"{self.name} has {self.nbytes} bytes, and {offset + nbytes} are needed: it is incomplete; copy it again.")
        data = bytearray(nbytes)
        self._fill(memoryview(data), offset)
        return data

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        if position < 0:
            raise UserError(f"there is no byte {position}")
        self._position = position
        return position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self.nbytes - self._position))
        self._fill(memoryview(buffer)[:count], self._position)
        self._position += count
        return count

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            descriptor = open_regular(self._path)
        except OSError as error:
            raise UserError(f"{self.name} cannot be read ({error.strerror}); copy it again.") from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _fill(self, buffer: memoryview, offset: int) -> None:
        done = 0
        with self._opened() as descriptor:
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], self._start + offset + done)
                if count == 0:
                    raise UserError(f"{self.name} has become shorter while it was read; copy it again.")
                done += count
