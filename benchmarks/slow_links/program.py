"""How a program that measures over slow links ends: its exit code, and its ranks with it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from testbed.sandbox import CannotIsolate

MISTAKE_EXIT_CODE = 2
FAILURE_EXIT_CODE = 1


def exit_code_of(program: str, run: Callable[[], None]) -> int:
    """0, or the code of the error that `run` has raised and this has printed."""
    try:
        run()
    except (ValueError, OSError, CannotIsolate) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return MISTAKE_EXIT_CODE
    except RuntimeError as error:
        print(f"{program}: failed: {error}", file=sys.stderr)
        return FAILURE_EXIT_CODE
    return 0


def end_by_exceptions() -> None:
    """Lets signals that end this program raise RuntimeError, so that the ranks are ended too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    raise RuntimeError(f"ended by {signal.Signals(number).name}; the same command continues after what is finished")
