"""Appends JSON objects to a file, one per line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from megatron_zpp.system.output_file import STANDARD_STREAMS, named_output
from megatron_zpp.system.user_error import UserError


class JsonLinesWriter:
    """Appends to `path`, also in a resumed run. When `write` returns, the line has reached the operating system.

    Floats keep all digits. NaN and infinities are written as NaN and Infinity, which Python's json reads back.
    The null device and the standard streams are written to as they are. Raises UserError if the file cannot be opened for writing, and
    for a pipe or another device.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = named_output(path)
            ends_in_mid_line = str(path) not in STANDARD_STREAMS and _ends_in_mid_line(descriptor)
            self._file = open(descriptor, "a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--log-jsonl {path} cannot be written ({error.strerror}); choose a file in a writable folder.") from error
        if ends_in_mid_line:
            self._file.write("\n")

    def write(self, values: Mapping[str, object]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLinesWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def has_earlier_lines(path: str) -> bool:
    """Whether a run has written to this file before. False for a file that cannot be read, the null device and the standard streams."""
    return path not in STANDARD_STREAMS and os.path.isfile(path) and os.path.getsize(path) > 0


def _ends_in_mid_line(descriptor: int) -> bool:
    """Whether a killed run left an incomplete last line; the next object must then start on a new line."""
    nbytes = os.fstat(descriptor).st_size
    return nbytes > 0 and os.pread(descriptor, 1, nbytes - 1) != b"\n"
