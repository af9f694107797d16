"""What one flag declares: a default, the values it allows, a unit, a help text and other spellings."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

REQUIRED = "required"


class FlagError(ValueError):
    """A user's mistake on the command line: flag, value, rule and remedy in one sentence."""


@dataclass(frozen=True)
class Bounds:
    """The numbers a flag allows; NaN and infinities are never among them."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    multiple_of: int | None = None

    def contain(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and (self.multiple_of is None or value % self.multiple_of == 0)
        )

    def __str__(self) -> str:
        limits = (
            ("a multiple of", self.multiple_of),
            ("at least", self.at_least),
            ("above", self.above),
            ("at most", self.at_most),
            ("below", self.below),
        )
        return " and ".join(f"{words} {limit}" for words, limit in limits if limit is not None)


POSITIVE_COUNT = Bounds(at_least=1)
COUNT = Bounds(at_least=0)
POSITIVE = Bounds(above=0)
NOT_NEGATIVE = Bounds(at_least=0)
FRACTION = Bounds(at_least=0, below=1)

Choices = tuple[Any, ...]


@dataclass(frozen=True)
class Flag:
    """The declaration of one flag, kept in the metadata of its dataclass field.

    otherwise: what `resolve` puts in place of a default of None, in words; REQUIRED where the user must say.
    shorthands: flags without a value that stand for this one with a certain value, and that value.
    """

    help: str
    unit: str
    aliases: tuple[str, ...]
    allowed: Choices | Bounds | None
    otherwise: str
    shorthands: tuple[tuple[str, Any], ...]


def flag(
    default: Any,
    *,
    help: str,
    unit: str = "",
    aliases: tuple[str, ...] = (),
    allowed: Choices | Bounds | None = None,
    otherwise: str = "",
    shorthands: tuple[tuple[str, Any], ...] = (),
) -> Any:
    """A dataclass field that the command line, the checks and the page of flags are built from."""
    return field(default=default, metadata={"flag": Flag(help, unit, aliases, allowed, otherwise, shorthands)})


def any_of(values: Sequence[object]) -> str:
    """The values as a choice in words: `1, 2 or 4`."""
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def check_value(spelling: str, value: Any, allowed: Choices | Bounds | None) -> None:
    """Nothing, where `allowed` has the value; otherwise a FlagError naming the flag as the user spelled it."""
    if isinstance(allowed, Bounds):
        if not allowed.contain(value):
            raise FlagError(f"{spelling} {value} is out of range; choose a value that is {allowed}.")
    elif allowed is not None and value not in allowed:
        raise FlagError(f"{spelling} {value} is not available; {_choice_in_words(value, allowed)}")


def _choice_in_words(value: Any, allowed: Choices) -> str:
    by_lower_case = {str(choice).lower(): choice for choice in allowed}
    nearest = difflib.get_close_matches(str(value).lower(), by_lower_case, n=1)
    hint = f" (did you mean {by_lower_case[nearest[0]]}?)" if nearest else ""
    return f"choose {any_of(allowed)}{hint}."
