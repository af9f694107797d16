"""The declaration of one flag: default, allowed values, unit, help text, other spellings, and the flags that it depends on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_zpp.system.near_names import nearest_name
from megatron_zpp.system.user_error import UserError

REQUIRED = "required"


class FlagError(UserError):
    """A user's mistake on the command line: flag, value, rule and remedy in one sentence."""

    def finished_by(self, finish: Callable[[str], str]) -> FlagError:
        """The same error with the text that `finish` makes of its text."""
        return FlagError(finish(str(self)))


@dataclass(frozen=True)
class Bounds:
    """The numbers that a flag allows. NaN and infinities are never allowed.

    limit: the largest allowed number, if it only refuses what no run can mean; the page of flags does not show it.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    limit: float | None = None

    def contain(self, value: float) -> bool:
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.limit is None or value <= self.limit)
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

    def broken_by(self, value: float) -> str:
        """The bounds in words, with the limit if the value is above it."""
        if self.limit is None or not value > self.limit:
            return str(self)
        return " and ".join(filter(None, [str(self), f"at most {self.limit}"]))


# No run can mean more than these. A product that indexes something, such as samples times tokens, must fit in 64 bits.
LARGEST_COUNT = 2**40  # iterations, samples: a thousand samples per second for thirty years
LARGEST_LENGTH = 2**22  # tokens of a sample
LARGEST_TOKENS = LARGEST_COUNT * LARGEST_LENGTH
DIGITS = 19  # of LARGEST_TOKENS
LARGEST_WIDTH = 2**20  # values of a vector; a matrix of a million rows and columns fits no device
LARGEST_LAYERS = 2**11  # twice the deepest published transformer (1000 layers, arXiv 2203.00555)
LARGEST_VOCABULARY = 2**31 - 1  # token ids are at most int32
LARGEST_WORLD = 2**20  # ranks
LARGEST_MINUTES = 2**20  # two years; torch counts timeouts in nanoseconds of int64, which end after 292 years
LARGEST_PROCESSES = 2**10  # of one rank or tool; each takes memory and a file descriptor or more
LARGEST_NUMBER = 3e38  # fp32 ends there

POSITIVE_COUNT = Bounds(at_least=1, limit=LARGEST_COUNT)
COUNT = Bounds(at_least=0, limit=LARGEST_COUNT)
POSITIVE_LENGTH = Bounds(at_least=1, limit=LARGEST_LENGTH)
POSITIVE_TOKENS = Bounds(at_least=1, limit=LARGEST_TOKENS)
TOKENS = Bounds(at_least=0, limit=LARGEST_TOKENS)
POSITIVE_WIDTH = Bounds(at_least=1, limit=LARGEST_WIDTH)
POSITIVE_LAYERS = Bounds(at_least=1, limit=LARGEST_LAYERS)
POSITIVE_VOCABULARY = Bounds(at_least=1, limit=LARGEST_VOCABULARY)
VOCABULARY = Bounds(at_least=0, limit=LARGEST_VOCABULARY)
POSITIVE_RANKS = Bounds(at_least=1, limit=LARGEST_WORLD)
POSITIVE_MINUTES = Bounds(at_least=1, limit=LARGEST_MINUTES)
PROCESSES = Bounds(at_least=0, limit=LARGEST_PROCESSES)
POSITIVE = Bounds(above=0, limit=LARGEST_NUMBER)
NOT_NEGATIVE = Bounds(at_least=0, limit=LARGEST_NUMBER)
FRACTION = Bounds(at_least=0, below=1)

Choices = tuple[Any, ...]


@dataclass(frozen=True)
class Condition:
    """A condition on other fields: at least one of `fields` is on; or, if `values` are given, the only field has one of them.

    A field is on unless its value is None, False, 0 or an empty tuple.
    """

    fields: tuple[str, ...]
    values: Choices = ()

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """value_of: gives the value of a field by its name."""
        if self.values:
            return value_of(self.fields[0]) in self.values
        return any(is_on(value_of(name)) for name in self.fields)

    def __str__(self) -> str:
        """The condition as flags: `--profile or --record-memory-history`, `--lr-decay-style WSD`."""
        if self.values:
            return f"{spelling_of(self.fields[0])} {any_of(self.values)}"
        return any_of([spelling_of(name) for name in self.fields])


@dataclass(frozen=True)
class Needs:
    """A condition that must hold if a flag is given; otherwise giving the flag is an error.

    what: the need in words, such as "a folder to save in". instead: another flag, which has no such need.
    """

    condition: Condition
    what: str
    instead: str


@dataclass(frozen=True)
class NoEffect:
    """A rule by which a flag changes nothing: if the condition holds (holds_if is True), or if it does not (holds_if is False).

    reason: a text that begins with "with" or "without".
    """

    condition: Condition
    holds_if: bool
    reason: str


@dataclass(frozen=True)
class Flag:
    """The declaration of one flag, kept in the metadata of its dataclass field.

    otherwise: what `resolve` fills in for a default of None, in words; REQUIRED if the user must give a value.
    shorthands: flags that take no value and set this one, each with the value that it sets.
    is_phrase: several words make one value, because scripts lose the quotes around it.
    needs: the condition that must hold if the flag is given. without_effect: rules by which it changes nothing; the user is told the first
    that applies.
    """

    help: str
    unit: str
    aliases: tuple[str, ...]
    allowed: Choices | Bounds | None
    otherwise: str
    shorthands: tuple[tuple[str, Any], ...]
    needs: Needs | None
    without_effect: tuple[NoEffect, ...]
    is_phrase: bool


def flag(
    default: Any,
    *,
    help: str,
    unit: str = "",
    aliases: tuple[str, ...] = (),
    allowed: Choices | Bounds | None = None,
    otherwise: str = "",
    shorthands: tuple[tuple[str, Any], ...] = (),
    needs: Needs | None = None,
    without_effect: tuple[NoEffect, ...] = (),
    is_phrase: bool = False,
) -> Any:
    """A dataclass field with the declaration of a flag. The command line, the checks and the page of flags are made from it."""
    declared = Flag(help, unit, aliases, allowed, otherwise, shorthands, needs, without_effect, is_phrase)
    return field(default=default, metadata={"flag": declared})


def needs(*fields: str, what: str = "", instead: str = "", **values: Any) -> Needs:
    """Needs one of `fields` to be on, or the field named by keyword to have one of the values: `needs(lr_decay_style="WSD")`."""
    return Needs(_condition(fields, values), what, instead)


def unless(*fields: str, why: str = "", **values: Any) -> tuple[NoEffect, ...]:
    """No effect unless one of `fields` is on, or the field named by keyword has one of the values. why: appended to the reason."""
    condition = _condition(fields, values)
    return (NoEffect(condition, False, f"without {condition}{why}"),)


def when(*fields: str, **values: Any) -> tuple[NoEffect, ...]:
    """No effect when one of `fields` is on, or when the field named by keyword has one of the values."""
    conditions = [_condition((name,), {}) for name in fields]
    conditions += [Condition((name,), (value,)) for name, choices in values.items() for value in _as_tuple(choices)]
    return tuple(NoEffect(condition, True, f"with {condition}") for condition in conditions)


def _condition(fields: tuple[str, ...], values: dict[str, Any]) -> Condition:
    if not values:
        return Condition(fields)
    ((name, choices),) = values.items()
    return Condition((name,), _as_tuple(choices))


def _as_tuple(choices: Any) -> Choices:
    return choices if isinstance(choices, tuple) else (choices,)


def is_on(value: Any) -> bool:
    """Whether a value switches something on: it is neither None, False, 0 nor an empty tuple."""
    return value not in (None, False, 0, ())


def spelling_of(name: str) -> str:
    """The flag of a field: `num_layers` is `--num-layers`."""
    return "--" + name.replace("_", "-")


def in_words(name: str, value: Any) -> str:
    """A flag as a user would type it: `--bf16`, `--lr 0.1`, `--profile-ranks 0 1`."""
    if value is True:
        return spelling_of(name)
    return f"{spelling_of(name)} {' '.join(value) if isinstance(value, tuple) else value}"


def flags_in(text: str) -> list[str]:
    """The flags that a text names, in their order."""
    return re.findall(r"--[a-z][\w-]*", text)


def naming_sources(text: str, sources: Mapping[str, str]) -> str:
    """The text of an error, followed by the source of each flag in the text that a file, a preset or another spelling has set."""
    named = flags_in(text)
    origins = [f"{spelling_of(name)} is {source}" for name, source in sources.items() if spelling_of(name) in named]
    return f"{text.removesuffix('.')} ({', '.join(origins)})." if origins else text


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def next_multiple(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def nearest(numbers: Iterable[int], wish: int) -> list[int]:
    """The up to four numbers that are nearest to `wish`, ascending."""
    return sorted(sorted(numbers, key=lambda number: abs(number - wish))[:4])


def whole_number(text: str) -> int | None:
    """The number that the text spells in plain digits 0 to 9; None for any other text, and for more than LARGEST_TOKENS."""
    if not (text.isascii() and text.isdigit()) or len(text) > DIGITS:
        return None
    number = int(text)
    return number if number <= LARGEST_TOKENS else None


def any_of(values: Sequence[object]) -> str:
    """The values as a choice in words: `1, 2 or 4`."""
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def check_value(spelling: str, value: Any, allowed: Choices | Bounds | None) -> None:
    """Raises FlagError if the value is not allowed. spelling: the flag as the user wrote it."""
    if isinstance(allowed, Bounds):
        if not allowed.contain(value):
            raise FlagError(f"{spelling} {value} is out of range; choose a value that is {allowed.broken_by(value)}.")
    elif allowed is not None and value not in allowed:
        raise FlagError(f"{spelling} {value} is not available; {_choice_in_words(value, allowed)}")


def _choice_in_words(value: Any, allowed: Choices) -> str:
    meant = nearest_name(str(value), map(str, allowed), least_likeness=0.6)
    hint = f" (did you mean {meant}?)" if meant is not None else ""
    return f"choose {any_of(allowed)}{hint}."
