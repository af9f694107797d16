"""The schema as a list of command-line options."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from megatron_zpp.config.flag import Flag, FlagError
from megatron_zpp.config.schema import GROUPS

KIND_IN_WORDS = {int: ("a whole number", "8"), float: ("a number", "0.1")}


@dataclass(frozen=True)
class Option:
    """One field of the schema as the command line sees it. kind: int, float, str, bool or tuple (of strings)."""

    name: str
    group: str
    kind: type
    default: Any
    flag: Flag

    @property
    def spelling(self) -> str:
        return spelling_of(self.name)

    @property
    def spellings(self) -> tuple[str, ...]:
        """What a value may follow."""
        return (self.spelling, *self.flag.aliases)

    @property
    def all_spellings(self) -> tuple[str, ...]:
        return (*self.spellings, *(spelling for spelling, _ in self.flag.shorthands))

    def value_from(self, spelling: str, words: Sequence[str]) -> Any:
        """The value that the words after the flag stand for. Raises FlagError for words of another kind."""
        if spelling in dict(self.flag.shorthands):
            return dict(self.flag.shorthands)[spelling]
        if self.kind is bool:
            return True
        if self.kind is tuple:
            return tuple(words)
        if self.kind is str and isinstance(self.flag.allowed, tuple):
            return _choice(words[0], self.flag.allowed)
        try:
            return self.kind(words[0])
        except ValueError:
            kind, example = KIND_IN_WORDS[self.kind]
            raise FlagError(f"{spelling} {words[0]} is not {kind}; give one, such as {example}.") from None


@cache
def options() -> tuple[Option, ...]:
    """All options, in the order of the schema."""
    return tuple(option for group, members in GROUPS.items() for option in _options_of(group, members))


def spelling_of(name: str) -> str:
    """The flag of a field: `num_layers` is `--num-layers`."""
    return "--" + name.replace("_", "-")


def _choice(word: str, choices: Sequence[str]) -> str:
    """The choice that the word is but for capitals, in which Megatron's programs differ; the word itself where it is none."""
    return next((choice for choice in choices if choice.casefold() == word.casefold()), word)


def _options_of(group: str, members: type) -> list[Option]:
    hints = get_type_hints(members)
    return [Option(member.name, group, _kind(hints[member.name]), member.default, member.metadata["flag"]) for member in fields(members)]


def _kind(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in get_args(hint) if member is not type(None))
    kind: type = get_origin(hint) or hint
    return kind
