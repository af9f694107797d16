"""The tiers of tests, from cheap to dear, and the promise that a test starts no more ranks than its tier says.

pure: no ranks. virtual: ranks as threads of this process. gloo: ranks as processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

TIERS = ("pure", "virtual", "gloo")
_entered: list[str] = []


@contextmanager
def entered(tier: str) -> Iterator[None]:
    """A test of this tier runs."""
    _entered.append(tier)
    try:
        yield
    finally:
        _entered.pop()


def require(tier: str) -> None:
    """Raises RuntimeError in a test of a cheaper tier; outside of tests anything goes."""
    if _entered and TIERS.index(_entered[-1]) < TIERS.index(tier):
        raise RuntimeError(f"a test of the {_entered[-1]} tier starts {tier} ranks; mark it with pytest.mark.{tier}")
