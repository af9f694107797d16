"""The schema as a list of command-line options. Reads their values, checks their rules, and writes Megatron's block of arguments."""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from megatron_zpp.config.flag import REQUIRED, Flag, FlagError, check_value, in_words, spelling_of
from megatron_zpp.config.schema import GROUPS, PLAN_GROUP, Config

KIND_IN_WORDS = {int: ("a whole number", "8"), float: ("a number", "0.1")}
ARGUMENTS_HEADER = "------------------------ arguments ------------------------"
ARGUMENTS_FOOTER = "-------------------- end of arguments ---------------------"
ARGUMENT_NAME_COLUMNS = 48


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
        """The flag and its aliases; each takes a value."""
        return (self.spelling, *self.flag.aliases)

    @property
    def all_spellings(self) -> tuple[str, ...]:
        return (*self.spellings, *(spelling for spelling, _ in self.flag.shorthands))

    def value_from(self, spelling: str, words: Sequence[str]) -> Any:
        """The value that the words after the flag give, with the home folder for the ~ of a path.

        Raises FlagError for a word that is not of the option's kind.
        """
        if self.flag.unit == "path":
            words = [os.path.expanduser(word) for word in words]  # a shell does not replace it in --save=~/x
        if spelling in dict(self.flag.shorthands):
            return dict(self.flag.shorthands)[spelling]
        if self.kind is bool:
            return True
        if self.kind is tuple:
            return tuple(words)
        if self.kind is str and isinstance(self.flag.allowed, tuple):
            return _choice(words[0], self.flag.allowed)
        if self.flag.is_phrase:
            return " ".join(words)
        try:
            return self.kind(words[0])
        except ValueError:
            kind, example = KIND_IN_WORDS[self.kind]
            raise FlagError(f"{spelling} {words[0]} is not {kind}; give one, such as {example}.") from None


@cache
def options() -> tuple[Option, ...]:
    """All options, in the order of the schema."""
    return tuple(option for group, members in GROUPS.items() for option in _options_of(group, members))


def check_values(config: Config) -> None:
    """Raises FlagError if a required flag is missing or a value is out of its range."""
    missing = [option.spelling for option in options() if option.flag.otherwise == REQUIRED and config.value_of(option.name) is None]
    if missing:
        example = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024"
        raise FlagError(f"{', '.join(missing)} must be given; a small GPT is {example}.")
    for option in options():
        value = config.value_of(option.name)
        if value is not None:
            check_value(option.spelling, value, option.flag.allowed)


def check_one_of(config: Config, *names: str) -> None:
    """Raises FlagError if more than one of these fields has another value than its default."""
    default = Config()
    given = [in_words(name, config.value_of(name)) for name in names if config.value_of(name) != default.value_of(name)]
    if len(given) > 1:
        raise FlagError(f"{given[0]} and {given[1]} exclude each other; give one of them.")


def check_needs(config: Config) -> None:
    """Raises FlagError if a flag is given without what it needs beside it."""
    for option in options():
        _check_needs(option, config)


def _check_needs(option: Option, config: Config) -> None:
    needs, value = option.flag.needs, config.value_of(option.name)
    is_off = value == 0 and option.default == 0
    if needs is None or option.name not in config.given or is_off or needs.condition.holds(config.value_of):
        return
    given = in_words(option.name, value)
    if needs.what:
        raise FlagError(f"{given} needs {needs.what}; give {needs.condition}.")
    instead = f", or use {needs.instead}" if needs.instead else ""
    raise FlagError(f"{given} changes nothing without {needs.condition}; give that as well{instead}.")


def declared_without_effect(config: Config) -> list[str]:
    """One line for each given flag that changes nothing together with the other flags, as its declaration says."""
    lines = []
    for option in options():
        reasons = [rule.reason for rule in option.flag.without_effect if rule.condition.holds(config.value_of) == rule.holds_if]
        if option.name in config.given and reasons:
            lines.append(f"{option.spelling} has no effect {reasons[0]}")
    return lines


def arguments(config: Config) -> dict[str, str]:
    """All fields but those of --dry-run's plan, sorted by name, with their values as text."""
    names = sorted(option.name for option in options() if option.group != PLAN_GROUP)
    return {name: _as_text(config.value_of(name)) for name in names}


def arguments_block(config: Config) -> str:
    """The block of arguments that Megatron prints at start-up: one line per argument, the names filled up with dots."""
    lines = [f"  {name} {'.' * (ARGUMENT_NAME_COLUMNS - len(name))} {value}" for name, value in arguments(config).items()]
    return "\n".join([ARGUMENTS_HEADER, *lines, ARGUMENTS_FOOTER])


def _as_text(value: object) -> str:
    return " ".join(value) or "None" if isinstance(value, tuple) else str(value)


def _choice(word: str, choices: Sequence[str]) -> str:
    """The choice that equals the word but for upper and lower case, in which Megatron's programs differ; the word itself if none does."""
    return next((choice for choice in choices if choice.casefold() == word.casefold()), word)


def _options_of(group: str, members: type) -> list[Option]:
    hints = get_type_hints(members)
    return [Option(member.name, group, _kind(hints[member.name]), member.default, member.metadata["flag"]) for member in fields(members)]


def _kind(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in get_args(hint) if member is not type(None))
    kind: type = get_origin(hint) or hint
    return kind
