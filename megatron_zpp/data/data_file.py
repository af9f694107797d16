"""A file that is read at given places.

A memory map would kill the process, without a word, if somebody cut the file off, or if its disk failed. A read ends with an error.
"""

from __future__ import annotations

import os
import weakref

from megatron_zpp.system.outside import open_regular
from megatron_zpp.system.user_error import UserError


class DataFile:
    """A regular file that is open for reading. Only path and remedy are pickled. Processes that are forked may read it at once.

    remedy: what to do about a file that has been cut off or cannot be read. nbytes: of the file when it was opened.
    A file that is removed, or replaced by another of its name, is still read. Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: str, remedy: str) -> None:
        self.path = path
        self.remedy = remedy
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        self.nbytes = os.fstat(self._descriptor).st_size

    def __reduce__(self) -> tuple[type[DataFile], tuple[str, str]]:
        return DataFile, (self.path, self.remedy)

    def read(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes from `offset` on. Raises UserError if the file does not hold them."""
        try:
            content = os.pread(self._descriptor, nbytes, offset)
            while len(content) < nbytes and (more := os.pread(self._descriptor, nbytes - len(content), offset + len(content))):
                content += more  # the system reads at most 2 GiB at once
        except OSError as error:
            raise UserError(f"{self.path} cannot be read any more ({error.strerror}); {self.remedy}") from error
        if len(content) < nbytes:
            now = os.fstat(self._descriptor).st_size
            raise UserError(f"{self.path} was cut off while it was in use: it had {self.nbytes} bytes, it has {now}; {self.remedy}")
        return content
