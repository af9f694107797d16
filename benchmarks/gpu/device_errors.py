"""Goes on after errors, except after those that leave a device unusable for the rest of the process."""

from __future__ import annotations

from collections.abc import Callable

from gpu.outcome import NotDone, Outcome

LONGEST = 400  # characters of an error


def is_fatal(error: BaseException) -> bool:
    """Whether the device cannot be used any more: an illegal access, a failed assertion or a failed launch."""
    text = str(error).lower()
    return "cuda error" in text and "out of memory" not in text


def attempt(outcome: Outcome, what: str, call: Callable[[], None]) -> None:
    """Calls `call`. An error in it is a failure of the part, which goes on. A fatal one is raised."""
    try:
        call()
    except NotDone as reason:
        outcome.omit(f"{what}: {reason}")
    except Exception as error:
        outcome.check(f"{what} runs, and does not end with {in_words(error)}", holds=False)
        if is_fatal(error):
            raise


def in_words(error: BaseException) -> str:
    """In one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"
