"""Appends JSON objects to a file, one per line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType


class JsonLinesWriter:
    """Appends to `path`, also in a resumed run. When `write` returns, the line has reached the operating system.

    Floats keep all digits. NaN and infinities are written as NaN and Infinity, which Python's json reads back.
    Raises ValueError if the file cannot be opened for writing.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            ends_in_mid_line = _ends_in_mid_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--log-jsonl {path} cannot be written ({error.strerror}); choose a file in a writable folder.") from error
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


def _ends_in_mid_line(path: Path) -> bool:
    """Whether a killed run left an incomplete last line; the next object must then start on a new line."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
