"""Ends parts one after the other, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Callable


def end_all(first: Callable[[], None], *others: Callable[[], None]) -> None:
    """Makes all calls, even if some fail. Raises the first error, which has the next one as its context."""
    try:
        first()
    except BaseException as error:
        try:
            if others:
                end_all(*others)
        except BaseException:
            raise error  # noqa: B904  the later error becomes its context
        raise
    if others:
        end_all(*others)
