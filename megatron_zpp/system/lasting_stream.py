"""Standard output and error that outlive their readers: a closed terminal, a cut ssh connection, a full disk."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO, cast

READER_IS_GONE = (errno.EPIPE, errno.EIO)  # a pipe, a terminal


class LastingStream:
    """A text stream whose errors never reach the program that prints. After an error, text may be missing.

    When the reader is gone, the file descriptor is pointed at /dev/null, so that libraries and child processes can print as well. After any
    other error, such as a full disk, later text is written again as soon as that is possible.
    name: for messages.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._note(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._note(error)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._stream, attribute)

    def _note(self, error: OSError) -> None:
        is_first, self.failure = self.failure is None, error
        if error.errno in READER_IS_GONE:
            _point_at_devnull(self._stream.fileno())
        if is_first:
            print(f"WARNING: {self._name} failed ({error}); the run goes on, and some of its lines are lost.", file=sys.stderr, flush=True)


def use_lasting_streams() -> None:
    """Replaces sys.stdout and sys.stderr by streams that last. One that was closed before the start becomes /dev/null.

    Characters that their encoding lacks are printed as escapes such as \\xe9.
    """
    for attribute, name in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, attribute) or open(os.devnull, "w")
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        if not isinstance(stream, LastingStream):
            setattr(sys, attribute, cast(TextIO, LastingStream(stream, name)))


def tell_lost_lines() -> None:
    """Prints on standard error, for the end of the program, that lines of standard output are lost."""
    if isinstance(sys.stdout, LastingStream) and sys.stdout.failure is not None:
        print(f"WARNING: standard output is incomplete, because it failed ({sys.stdout.failure}).", file=sys.stderr, flush=True)


def _point_at_devnull(descriptor: int) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)
