"""Outputs that a run can do without: logs, points, traces. One that fails is switched off, and the run goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Generic, TypeVar

from megatron_zpp.system.user_error import UserError

W = TypeVar("W")


class Output(Generic[W]):
    """Writes through a writer until that fails once: the error is printed on standard error, and nothing more is written.

    name: the flag with its file or folder, for messages. open_writer: makes the writer; its UserError is
    raised, any other Exception switches the output off.
    """

    def __init__(self, name: str, open_writer: Callable[[], W], rank: int) -> None:
        self._name = name
        self._rank = rank
        self._writer: W | None = None
        try:
            self._writer = open_writer()
        except UserError:
            raise
        except Exception as error:
            self._switch_off(error)

    def attempt(self, write: Callable[[W], object]) -> None:
        """Calls write(writer), unless an earlier call has failed. Any Exception switches the output off."""
        if self._writer is None:
            return
        try:
            write(self._writer)
        except Exception as error:  # packages raise errors of their own kinds
            self._switch_off(error)

    def tell_if_incomplete(self) -> None:
        """Prints again, for the end of the run, that the output has failed."""
        if self._writer is None:
            self._tell("is incomplete, because it failed during the run")

    def _switch_off(self, error: Exception) -> None:
        self._writer = None
        self._tell(f"failed ({_on_one_line(error)}); it is switched off, and the run goes on without it")

    def _tell(self, text: str) -> None:
        print(f"[Rank {self._rank}] WARNING: {self._name} {text}.", file=sys.stderr, flush=True)


def _on_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
