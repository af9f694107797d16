"""Reads small files from outside this program: JSON and plain text that a person or another program may have written.

A pipe or a device would hang a reader or never end, so only regular files are opened, and only up to a limit of bytes. Whatever is wrong
with a file is one error of one sentence: which file, which key, what it must be, what it is, and the remedy.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron_zpp.system.near_names import nearest_file
from megatron_zpp.system.user_error import UserError

SETTINGS_BYTES = 64 << 20  # of a file that a person writes, such as a list of corpora
VOCABULARY_BYTES = 1 << 30
LOG_LINE_BYTES = 16 << 20  # of a line in a log of a run
MOST_DEPTH = 64  # of brackets in JSON; a deeper file would exhaust the stack of its reader
WHOLE_NUMBER_LIMIT = 2**63  # the first number that the 64-bit integers of torch and numpy cannot hold
COUNT_RULE = "a whole number from 0 to 2^63 - 1"
FINITE_RULE = "a finite number below 2^63"
_SHOWN_CHARACTERS = 60
_SHOWN_ENTRIES = 8
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: str | Path, *, follows_links: bool = True) -> int:
    """A descriptor for reading a regular file. Raises OSError, without waiting, for a missing file and for everything else.

    follows_links: False for a file in a folder to which this program also writes, where a link would be somebody else's.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW))
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None  # a name that no file can have
    except OSError as error:
        if error.errno == errno.ELOOP and not follows_links:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


@dataclass(frozen=True)
class OutsideFile:
    """A small file from outside, and the words for its errors.

    name: how messages call it, with the flag that names it, such as `--vocab-file vocab.json`. remedy: ends every message.
    error: makes the error from its sentence. most_bytes: limit of the file's size. follows_links: see `open_regular`.
    """

    path: Path
    name: str
    remedy: str = ""
    error: Callable[[str], Exception] = UserError
    most_bytes: int = SETTINGS_BYTES
    follows_links: bool = True

    def refuse(self, finding: str) -> NoReturn:
        """Raises the error `name finding; remedy`."""
        self._raise(f"{self.name} {finding}")

    def refuse_value(self, place: str, rule: str, value: Any) -> NoReturn:
        """Raises the error `name: place must be rule, not value; remedy`. place: empty for the value of the whole file."""
        self._raise(f"{self.name}{f': {place}' if place else ''} must be {rule}, not {_shown(value)}")

    def _raise(self, sentence: str) -> NoReturn:
        raise self.error(f"{sentence}; {self.remedy}" if self.remedy else sentence) from None

    def is_missing(self) -> bool:
        """Whether there is no such file. One that cannot be looked up is not missing."""
        try:
            os.stat(self.path, follow_symlinks=self.follows_links)
        except FileNotFoundError:
            return True
        except (OSError, ValueError):  # ValueError: a name that no file can have
            return False
        return False

    def check_is_there(self) -> None:
        """Refuses a missing file that a flag names, with the file beside it that was probably meant."""
        if self.is_missing():
            meant = nearest_file(self.path)
            self.refuse(f"does not exist on this machine{f' (did you mean {meant}?)' if meant is not None else ''}")

    def content(self) -> bytes:
        """All bytes of the file."""
        try:
            with open(open_regular(self.path, follows_links=self.follows_links), "rb") as file:
                data = file.read(self.most_bytes + 1)
        except OSError as error:
            self.refuse(f"cannot be read ({error.strerror})")
        if len(data) > self.most_bytes:
            self.refuse(f"has more than {self.most_bytes} bytes")
        return data

    def text(self, content: bytes | None = None) -> str:
        """The text of the file, without a byte order mark. It must be UTF-8. content: of the file, if it has been read."""
        try:
            return (self.content() if content is None else content).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self.refuse(f"is not UTF-8 text (byte {error.start})")

    def json(self, content: bytes | None = None, *, has_unique_keys: bool = False, has_any_numbers: bool = False) -> Any:
        """The JSON value in the file.

        content: of the file, if it has been read.
        has_unique_keys: refuse a key that occurs twice in an object, rather than take the last one.
        has_any_numbers: also accept NaN, infinities and whole numbers of 2^63 and more.
        """
        try:
            return self._value_of(self.text(content), has_unique_keys=has_unique_keys, has_any_numbers=has_any_numbers)
        except json.JSONDecodeError as error:
            self.refuse(f"is not JSON: line {error.lineno}, column {error.colno}: {error.msg}")

    def members(self, content: bytes | None = None, *, has_unique_keys: bool = False, has_any_numbers: bool = False) -> Members:
        """The JSON object in the file, read as by `json`."""
        return self._members_of(self.json(content, has_unique_keys=has_unique_keys, has_any_numbers=has_any_numbers))

    def entries(self) -> list[Any]:
        """The JSON list in the file."""
        found = self.json()
        if not isinstance(found, list):
            self.refuse_value("", "a JSON list", found)
        return found

    def list_of_members(self) -> Iterator[Members]:
        """The objects of the JSON list in the file."""
        return _objects(self.entries(), self)

    def lines_of_members(self, left_out: Callable[[int], None]) -> Iterator[Members]:
        """The JSON objects in the lines of the file, with any numbers. The file may be of any size; it is read line by line.

        left_out: receives the number of a line that is not JSON, as a killed program leaves it.
        """
        try:
            with open(open_regular(self.path, follows_links=self.follows_links), "rb") as file:
                for number, line in enumerate(iter(partial(file.readline, LOG_LINE_BYTES + 1), b""), 1):
                    place = replace(self, name=f"{self.name}, line {number}")
                    if len(line) > LOG_LINE_BYTES:
                        place.refuse(f"has more than {LOG_LINE_BYTES} bytes")
                    try:
                        found = place._value_of(place.text(line), has_any_numbers=True)
                    except json.JSONDecodeError:
                        left_out(number)
                    else:
                        yield place._members_of(found)
        except OSError as error:
            self.refuse(f"cannot be read ({error.strerror})")

    def _value_of(self, text: str, *, has_unique_keys: bool = False, has_any_numbers: bool = False) -> Any:
        """The value of a JSON text, read as by `json`. Raises JSONDecodeError for a text that is not JSON."""
        twice: list[str] = []
        try:
            found = json.loads(text, object_pairs_hook=partial(_object_of, twice) if has_unique_keys else None)
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # a whole number of thousands of digits
            self.refuse(f"is not usable JSON ({error})")
        except RecursionError:
            self.refuse(f"is nested more than {MOST_DEPTH} levels deep")
        if twice:
            self.refuse(f"has {twice[0]} twice in one object")
        self._check_values(found, has_any_numbers=has_any_numbers)
        return found

    def _members_of(self, found: Any) -> Members:
        if not isinstance(found, dict):
            self.refuse_value("", "a JSON object", found)
        return Members(found, self)

    def _check_values(self, root: Any, *, has_any_numbers: bool) -> None:
        # A loop over levels, because a recursive walk is what a deep file exhausts.
        level = [("", root)] if isinstance(root, dict | list) else []
        if not level and not _is_usable(root):
            self.refuse_value("", FINITE_RULE, root)
        for _ in range(MOST_DEPTH):
            deeper: list[tuple[str, Any]] = []
            for place, container in level:
                for key, value in container.items() if isinstance(container, dict) else enumerate(container):
                    kind = type(value)
                    if kind is dict or kind is list:
                        deeper.append((_place_of(place, key), value))
                    elif not has_any_numbers and (kind is int or kind is float) and not _is_usable(value):
                        self.refuse_value(_place_of(place, key), FINITE_RULE, value)
            if not deeper:
                return
            level = deeper
        self.refuse(f"is nested more than {MOST_DEPTH} levels deep")


class Members:
    """The members of a JSON object, each of the kind that is asked for; another kind, or a missing member, is refused by its key."""

    __slots__ = ("_file", "_place", "values")

    def __init__(self, values: Mapping[str, Any], file: OutsideFile, place: str = "") -> None:
        self.values = values
        self._file = file
        self._place = place

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def filled(self, missing: Mapping[str, Any], null: Mapping[str, Any] | None = None) -> Members:
        """The same object, where a key of `missing` that is not there has its value, and a key of `null` has its value instead of null."""
        given = {key: (null or {}).get(key) if value is None else value for key, value in self.values.items()}
        return Members({**missing, **given}, self._file, self._place)

    def require_only(self, keys: AbstractSet[str]) -> None:
        if self.values.keys() <= keys:
            return
        for key in self.values:
            if key not in keys:
                self._file.refuse(f"has the unknown key {_place_of(self._place, key)}")

    def any(self, key: str) -> Any:
        if key not in self.values:
            self._file.refuse(f"lacks {_place_of(self._place, key)}")
        return self.values[key]

    def count(self, key: str) -> int:
        return self._integer(key, 0, COUNT_RULE)

    def positive_count(self, key: str) -> int:
        return self._integer(key, 1, "a whole number from 1 to 2^63 - 1")

    def whole_number(self, key: str) -> int:
        return self._integer(key, -WHOLE_NUMBER_LIMIT, "a whole number below 2^63")

    def _integer(self, key: str, smallest: int, rule: str) -> int:
        value = self.any(key)
        if type(value) is not int or not smallest <= value < WHOLE_NUMBER_LIMIT:
            self.refuse(key, rule)
        return value

    def number(self, key: str) -> float:
        value = self.any(key)
        if type(value) is float and math.isfinite(value):
            return value
        if type(value) is not int or not _is_usable(value):
            self.refuse(key, "a finite number")
        return float(value)

    def number_or_nan(self, key: str) -> float:
        """A number, which may also be NaN or infinite."""
        value = self.any(key)
        if type(value) is not float and (type(value) is not int or not _is_usable(value)):
            self.refuse(key, "a number")
        return float(value)

    def text(self, key: str) -> str:
        value = self.any(key)
        if not isinstance(value, str) or not is_encodable(value):
            self.refuse(key, "a string of Unicode characters")
        return value

    def switch(self, key: str) -> bool:
        value = self.any(key)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def counts(self, key: str) -> Sequence[int]:
        """A list of whole numbers >= 0."""
        values = self.list(key)
        if not all(type(value) is int and 0 <= value < WHOLE_NUMBER_LIMIT for value in values):
            self.refuse(key, f"a list of numbers, each {COUNT_RULE}")
        return values

    def texts(self, key: str) -> Sequence[str]:
        """A list of strings."""
        values = self.list(key)
        if not all(isinstance(value, str) and is_encodable(value) for value in values):
            self.refuse(key, "a list of strings of Unicode characters")
        return values

    def list(self, key: str) -> Sequence[Any]:
        values = self.any(key)
        if not isinstance(values, list):
            self.refuse(key, "a list")
        return values

    def members(self, key: str) -> Members:
        """An object in this one."""
        values = self.any(key)
        if not isinstance(values, dict):
            self.refuse(key, "an object")
        return Members(values, self._file, _place_of(self._place, key))

    def list_of_members(self, key: str) -> Iterator[Members]:
        """A list of objects."""
        return _objects(self.list(key), self._file, _place_of(self._place, key))

    def by_place(self, key: str) -> Members:
        """A list, as an object whose keys are the places in the list."""
        values = {str(place): value for place, value in enumerate(self.list(key))}
        return Members(values, self._file, _place_of(self._place, key))

    def refuse(self, key: str, rule: str) -> NoReturn:
        """Raises the error of the file: `key must be rule, not value`."""
        self._file.refuse_value(_place_of(self._place, key), rule, self.values[key])


def _object_of(twice: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. A key that occurs again is added to `twice`."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            twice.append(key)
        found[key] = value
    return found


def _objects(entries: Sequence[Any], file: OutsideFile, place: str = "") -> Iterator[Members]:
    """The entries of a JSON list at `place` of a file, each of which must be an object."""
    for index, values in enumerate(entries):
        if not isinstance(values, dict):
            file.refuse_value(_place_of(place, index), "an object", values)
        yield Members(values, file, _place_of(place, index))


def _place_of(place: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if place else key


def _is_usable(value: Any) -> bool:
    """Whether a number is finite and fits into 64 bits; True for every other value."""
    if type(value) is int:
        return -WHOLE_NUMBER_LIMIT <= value < WHOLE_NUMBER_LIMIT
    return not isinstance(value, float) or math.isfinite(value)


def is_encodable(text: str) -> bool:
    """Whether the text can be printed and can name a file: JSON can spell halves of characters, which nothing else accepts."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    if isinstance(value, dict | list) and len(value) > _SHOWN_ENTRIES:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
