"""A file of lines that grows while it is read."""

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_zpp.system.outside import LOG_LINE_BYTES, open_regular
from megatron_zpp.system.user_error import UserError

CHUNK_BYTES = 1 << 20


class FollowedFile:
    """Reads what a file has gained. It may not exist yet, may end in the middle of a line, and may be replaced or emptied.

    modified_at: seconds since the epoch at which it last changed; None before it was there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modified_at: float | None = None
        self._identity: tuple[int, int] | None = None  # of the file that was read, as the file system says
        self._offset = 0
        self._unfinished = b""

    def new_lines(self) -> Iterator[bytes | None]:
        """The whole lines since the last call. None comes first if these are the lines of another file.

        Raises OSError for what is not a regular file, and UserError for a line of more than LOG_LINE_BYTES.
        """
        try:
            file = open(open_regular(self.path), "rb", buffering=0)
        except FileNotFoundError:
            self._identity = None  # a new file may get the number of the old one
            return
        with file:
            status = os.fstat(file.fileno())
            self.modified_at = status.st_mtime
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                self._identity, self._offset, self._unfinished = identity, 0, b""
                yield None
            file.seek(self._offset)
            while chunk := file.read(CHUNK_BYTES):
                self._offset += len(chunk)
                *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
                if len(self._unfinished) > LOG_LINE_BYTES:
                    raise UserError(f"{self.path} has a line of more than {LOG_LINE_BYTES} bytes; give a file of --log-jsonl.")
                yield from lines
