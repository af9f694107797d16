"""Parses the command line, which is built from the schema. Mistakes are raised as FlagError; the entry decides which rank prints them."""

from __future__ import annotations

import argparse
import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

from megatron_zpp.config.flag import REQUIRED, Bounds, FlagError, any_of, check_value
from megatron_zpp.config.obsolete import ACCEPTED, AcceptedFlag, accepted_flag, notice, remedy_of_refused
from megatron_zpp.config.options import Option, options
from megatron_zpp.config.rules_context import check_exchange
from megatron_zpp.config.schema import GROUPS, Config

PROGRAM = "pretrain_zeropp_gpt.py"
ERROR_EXIT_CODE = 2
LEAST_LIKENESS = 0.8  # of an unknown flag and the one that a hint names; less like are flags that have nothing in common

FLAG = re.compile(r"--?[A-Za-z]")
METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


def parse_flags(argv: Sequence[str]) -> Config:
    """The flags as given. Every other field has its default or None; `resolve.resolve` fills it in.

    Raises FlagError with a sentence for each unknown flag, each value of the wrong kind or not available, and spellings that contradict
    each other, so that a script can be corrected in one go. Prints the help and raises SystemExit(0) for --help.
    """
    occurrences, unknown = _occurrences(argv)
    mistakes, values = list(_about_unknown_words(unknown)), dict[str, Any]()
    for option in options():
        if not occurrences.keys().isdisjoint(option.all_spellings):
            try:
                values[option.name] = _value_of(option, occurrences)
            except FlagError as error:
                mistakes.append(str(error))
    accepted = {spelling: found for spelling in occurrences if (found := accepted_flag(spelling)) is not None}
    mistakes += _about_refused_values(accepted, occurrences)
    config = Config().with_values(**values)
    try:
        check_exchange(config)
    except FlagError as error:
        mistakes.append(str(error))
    if mistakes:
        raise FlagError("\n".join(mistakes))
    notices = tuple(notice(spelling, found) for spelling, found in accepted.items())
    return replace(config, given=frozenset(values), notices=notices, sources=_other_spellings(occurrences))


def error_text(error: FlagError) -> str:
    """The lines that a user sees of a FlagError: one for each wrong flag."""
    return "\n".join(f"{PROGRAM}: error: {line}" for line in str(error).splitlines())


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether --help is among the words, even if others are wrong."""
    return not {"-h", "--help"}.isdisjoint(argv)


def help_text() -> str:
    """The text of --help, in groups."""
    return _parser().format_help()


class _Collect(argparse.Action):
    """Appends each occurrence of a flag to `namespace.occurrences` instead of converting it."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        namespace.occurrences.append((option_string, [values] if isinstance(values, str) else list(values)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(f"{message}; see --help.")


@cache
def _parser(others: frozenset[tuple[str, AcceptedFlag]] = frozenset()) -> argparse.ArgumentParser:
    """others: accepted flags that are declared as a family."""
    parser = _Parser(prog=PROGRAM, usage=f"{PROGRAM} [flags]", description="Pretrain a GPT.", allow_abbrev=False, exit_on_error=False)
    for group, members in GROUPS.items():
        section = parser.add_argument_group(group, (members.__doc__ or "").splitlines()[0])
        for option in options():
            if option.group == group:
                _add_option(section, option)
    section = parser.add_argument_group("accepted without effect")
    for spelling, accepted in {**ACCEPTED, **dict(others)}.items():
        _add(section, (spelling,), None if accepted.num_values == 1 else accepted.num_values, "VALUE", accepted.reason)
    return parser


def _add_option(section: Any, option: Option) -> None:
    nargs: int | str | None = 0 if option.kind is bool else "+" if option.kind is tuple or option.flag.is_phrase else None
    _add(section, option.spellings, nargs, _metavar(option), _help_of(option))
    for spelling, value in option.flag.shorthands:
        _add(section, (spelling,), 0, None, f"Short for {option.spelling} {value}.")


def _add(section: Any, spellings: Sequence[str], nargs: int | str | None, metavar: str | None, text: str) -> None:
    section.add_argument(*spellings, action=_Collect, nargs=nargs, metavar=metavar, help=text.replace("%", "%%"), default=argparse.SUPPRESS)


def _metavar(option: Option) -> str | None:
    if option.kind is bool:
        return None
    if isinstance(option.flag.allowed, tuple):
        return "{" + ",".join(str(choice) for choice in option.flag.allowed) + "}"
    return "PATH" if option.flag.unit == "path" else METAVARS[option.kind]


def _help_of(option: Option) -> str:
    details = [default_in_words(option)]
    if option.flag.unit not in ("", "1", "path"):
        details.append(f"unit: {option.flag.unit}")
    if isinstance(option.flag.allowed, Bounds):
        details.append(str(option.flag.allowed))
    return option.flag.help + (f" ({'; '.join(details)})" if details else "")


def default_in_words(option: Option) -> str:
    """`default: 0.1`, `default: 4 x --hidden-size`, `default: off`, `required` or `no default`."""
    if option.kind is bool:
        return "default: off"
    if option.default in (None, ()):
        otherwise = option.flag.otherwise
        return otherwise if otherwise == REQUIRED else f"default: {otherwise}" if otherwise else "no default"
    return f"default: {option.default}"


def _occurrences(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The words after each flag, by its spelling, and the words that belong to no flag.

    A spelling that is given twice keeps its last words, so that scripts can append.
    """
    namespace = argparse.Namespace(occurrences=[])
    words = {word.split("=")[0] for word in argv} - ACCEPTED.keys()
    of_families = frozenset((word, found) for word in words if (found := accepted_flag(word)) is not None)
    try:
        _, unknown = _parser(of_families).parse_known_args(list(argv), namespace)
    except argparse.ArgumentError as error:
        raise FlagError(f"{error.argument_name}: {error.message}; see --help.") from None
    return dict(namespace.occurrences), unknown


def _value_of(option: Option, occurrences: dict[str, list[str]]) -> Any:
    by_value: dict[Any, list[str]] = defaultdict(list)
    for spelling in option.all_spellings:
        if spelling in occurrences:
            value = option.value_from(spelling, occurrences[spelling])
            if option.kind is not tuple:
                check_value(spelling, value, option.flag.allowed)
            by_value[value].append(spelling)
    if len(by_value) > 1:
        shorthands = dict(option.flag.shorthands)
        contradictions = " and ".join(
            spelling if spelling in shorthands else f"{spelling} {value}" for value, spellings in by_value.items() for spelling in spellings
        )
        raise FlagError(f"{contradictions} are two values for one setting; give only one of them.")
    return next(iter(by_value))


def _other_spellings(occurrences: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """For each field that is given by another spelling of its flag, and not by the flag: a phrase with it, for errors about the flag."""
    phrases = {}
    for option in options():
        written = [spelling for spelling in option.all_spellings if spelling in occurrences]
        if written and option.spelling not in (spelling.replace("_", "-") for spelling in written):
            phrases[option.name] = f"given as {written[0]}"
    return phrases


def _about_refused_values(accepted: Mapping[str, AcceptedFlag], occurrences: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """One sentence for each accepted flag with values that would change something."""
    for spelling, found in accepted.items():
        words = occurrences[spelling]
        if found.only and not set(words) <= set(found.only):
            yield f"{' '.join([spelling, *words])} is not available, {found.reason}; choose {any_of(found.only)}, or leave it out."


def _about_unknown_words(words: Sequence[str]) -> Iterator[str]:
    """One sentence for each unknown flag. Other words may be their values; if there is no flag, one about the first word."""
    flags = dict.fromkeys(word.split("=")[0] for word in words if FLAG.match(word))
    if words and not flags:
        yield f"{words[0]} belongs to no flag; write a flag before it, or see --help."
    yield from map(_about_unknown, flags)


def _about_unknown(flag: str) -> str:
    instead = remedy_of_refused(flag)
    if instead is not None:
        return f"{flag} is not accepted; {instead}."
    known = [spelling for option in options() for spelling in option.all_spellings] + list(ACCEPTED)
    nearest = nearest_flag(flag, known)
    remedy = f"did you mean {nearest}?" if nearest is not None else "see --help for the list."
    return f"{flag} is not a flag of this program; {remedy}"


def nearest_flag(flag: str, known: Sequence[str]) -> str | None:
    """The known flag that an unknown one is most like; None if there is none."""
    by_name = {spelling.lstrip("-"): spelling for spelling in known}  # dashes would make short names alike
    nearest = difflib.get_close_matches(flag.lstrip("-").replace("_", "-"), by_name, n=1, cutoff=LEAST_LIKENESS)
    return by_name[nearest[0]] if nearest else None
