"""Goes on after errors, except after those that leave a device unusable for the rest of the process."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu.outcome import NotDone, Outcome

LONGEST = 400  # characters of an error
OF_CUDA = ("cuda error", "could not be launched")  # the words of torch, and of the kernels of this repository
# Errors of CUDA for which a call is refused; nothing has run, and the next call may work.
REFUSALS = ("out of memory", "invalid argument", "invalid configuration argument", "too many resources requested", "no kernel image")


def is_fatal(error: BaseException) -> bool:
    """Whether the device cannot be used any more: an illegal access, a failed assertion or a launch that failed while it ran."""
    text = str(error).lower()
    return any(words in text for words in OF_CUDA) and not any(refusal in text for refusal in REFUSALS)


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
