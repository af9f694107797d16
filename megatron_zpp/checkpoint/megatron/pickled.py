"""Reads a pickle as inert records: nothing that it names is imported, nothing that it asks for is called.

A pickle is a program for a stack machine. The machine here knows its opcodes, but where the machine of Python would import or call
something, it puts a record of the request on the stack. Readers of the records know the few that they need by name. Records may take some
times as many bytes as the pickle, and a pickle that asks for more is refused while it is read.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from megatron_zpp.system.user_error import UserError

SHOWN_CHARACTERS = 100  # of an error about a pickle, which may quote it
MOST_BITS = 256  # of a number; states of random generators have 128
FREE_BYTES = 1 << 20  # of records, for any pickle
RECORD_BYTES_PER_BYTE = 64  # of pickle; files of torch.save need up to 25, and metadata of distributed checkpoints up to 41


class PickleError(UserError):
    """The bytes are no pickle, or one with opcodes that neither torch nor Megatron writes."""


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a function or class, which is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, eq=False, slots=True)
class Outside:
    """The mark of a value that is stored outside the pickle, such as the elements of a tensor."""

    identity: Any


class Dictionary:
    """A dictionary as its pairs of key and value, in order. Keys may be records, so nothing is hashed here."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def members(self) -> dict[str, Any]:
        """The values of the keys that are text."""
        return {key: value for key, value in self.pairs if type(key) is str}


@dataclass(eq=False, slots=True)
class Made:
    """What a call would have made. state: what the object would have been given after it; contents: its items, if it has any."""

    by: Any
    arguments: Any
    state: Any = None
    contents: Dictionary | None = None

    def is_made_by(self, name: str) -> bool:
        return isinstance(self.by, Global) and str(self.by) == name


class Pickled(NamedTuple):
    """The record of the object, and the marks of all values outside the pickle."""

    root: Any
    outside: tuple[Outside, ...]


def contents_of(record: Any) -> dict[str, Any]:
    """The members of a dictionary, without the attributes that it may have besides; empty for any other record."""
    found = record.contents if isinstance(record, Made) else record
    return found.members() if isinstance(found, Dictionary) else {}


def members_of(record: Any) -> dict[str, Any]:
    """The members of a dictionary, or of an object with attributes; empty for any other record."""
    if isinstance(record, Made):
        attributes = record.state.members() if isinstance(record.state, Dictionary) else {}
        return contents_of(record) | attributes
    return record.members() if isinstance(record, Dictionary) else {}


def read_pickle(file: IO[bytes]) -> Pickled:
    """The pickle at the position of a file in memory, which is left after it. Raises PickleError."""
    machine = _Machine()
    try:
        start = file.tell()
        for opcode, argument, _ in pickletools.genops(file):
            machine.do(opcode.name, argument)
            machine.check_memory(file.tell() - start)
        return Pickled(machine.stack.pop(), tuple(machine.outside))
    except (ValueError, OverflowError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise PickleError(f"is not a pickle that torch writes ({(str(error) or type(error).__name__)[:SHOWN_CHARACTERS]})") from None


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.outside: list[Outside] = []
        self._marks: list[int] = []  # how much was on the stack at each mark
        self._memo: list[Any] = []
        self._record_bytes = 0  # at least what the records need; twice as much for those of torch

    def check_memory(self, pickle_bytes: int) -> None:
        """Raises UserError if the records need more memory than is due to `pickle_bytes` bytes of pickle."""
        if self._record_bytes > FREE_BYTES + RECORD_BYTES_PER_BYTE * pickle_bytes:
            raise UserError(f"its first {pickle_bytes} bytes ask for {self._record_bytes} bytes of memory")

    def do(self, name: str, argument: Any) -> None:
        self._record_bytes += _REFERENCE_BYTES + _RECORD_BYTES.get(name, 0)
        if name in _VALUES or isinstance(argument, str):
            self._record_bytes += sys.getsizeof(argument)
        if name in _VALUES:
            if type(argument) is int and argument.bit_length() > MOST_BITS:
                raise UserError(f"it has a number of {argument.bit_length()} bits")
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _OPCODES:
            _OPCODES[name](self, argument)
        else:
            raise UserError(f"it has the opcode {name}")

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def _after_mark(self) -> list[Any]:
        place = self._marks.pop()
        found = self.stack[place:]
        del self.stack[place:]
        return found

    def _pop(self, _: Any) -> None:
        if self._marks and self._marks[-1] >= len(self.stack):
            self._marks.pop()
        else:
            self.stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._after_mark()

    def _put(self, place: int) -> None:
        if not 0 <= place <= len(self._memo):
            raise UserError(f"it remembers value {place} as number {len(self._memo)}")
        self._memo[place : place + 1] = [self.stack[-1]]

    def _memoize(self, _: Any) -> None:
        self._memo.append(self.stack[-1])

    def _get(self, place: int) -> None:
        if place < 0:
            raise UserError(f"it asks for value {place}")
        self.stack.append(self._memo[place])

    def _list(self, _: Any) -> None:
        values = self._after_mark()
        self.stack.append(values)

    def _append(self, _: Any) -> None:
        value = self.stack.pop()
        self._extend([value])

    def _appends(self, _: Any) -> None:
        self._extend(self._after_mark())

    def _extend(self, values: list[Any]) -> None:
        found = self.stack[-1]
        if isinstance(found, Made):
            return  # a list of another class, such as a deque, whose values no reader looks at
        if not isinstance(found, list):
            raise UserError("values are appended to what is no list")
        found.extend(values)

    def _tuple(self, length: int | None) -> None:
        values = self._after_mark() if length is None else [self.stack.pop() for _ in range(length)][::-1]
        self.stack.append(tuple(values))

    def _dictionary(self, _: Any) -> None:
        values = self._after_mark()
        self.stack.append(Dictionary())
        self._set(values)

    def _set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set(self, values: list[Any]) -> None:
        found = self.stack[-1]
        if isinstance(found, Made) and found.contents is None:
            found.contents = Dictionary()
        contents = found.contents if isinstance(found, Made) else found
        if not isinstance(contents, Dictionary) or len(values) % 2:
            raise UserError("items are set in what is no dictionary")
        self._record_bytes += _PAIR_BYTES * len(values) // 2
        contents.pairs.extend(zip(values[::2], values[1::2], strict=True))

    def _global(self, text: str) -> None:
        module, _, name = text.partition(" ")
        self.stack.append(Global(module, name))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise UserError("a name is no text")
        self.stack.append(Global(module, name))

    def _call(self, _: Any) -> None:
        arguments, by = self.stack.pop(), self.stack.pop()
        self.stack.append(Made(by, arguments))

    def _call_with_names(self, _: Any) -> None:
        names, arguments, by = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(Made(by, (arguments, names)))

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        found = self.stack[-1]
        if not isinstance(found, Made):
            raise UserError("a state is given to what is no object")
        found.state = state

    def _outside(self, text: str | None) -> None:
        self.outside.append(Outside(self.stack.pop() if text is None else text))
        self.stack.append(self.outside[-1])


def _nothing(machine: _Machine, argument: Any) -> None:
    pass


_VALUES = frozenset(
    """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
    """.split()
)
_REFERENCE_BYTES = 24  # on the stack, and in a list or in the memo, which grow in steps
_PAIR_BYTES = 72
_RECORD_BYTES = {  # of what opcodes make, besides values, as sys.getsizeof says
    "MARK": 32,
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET", "LIST", "FROZENSET"), 64),
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), 64),
    **dict.fromkeys(("PERSID", "BINPERSID"), 48),
    **dict.fromkeys(("EMPTY_DICT", "DICT"), 112),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), 64),
    "NEWOBJ_EX": 128,
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), 160),
}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _nothing),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine._put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine._get),
    **dict.fromkeys(("LIST", "FROZENSET"), _Machine._list),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), _Machine._appends),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), lambda machine, _: machine.stack.append([])),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine._call),
    **dict.fromkeys(("PERSID", "BINPERSID"), _Machine._outside),
    "MARK": _Machine._mark,
    "POP": _Machine._pop,
    "POP_MARK": _Machine._pop_mark,
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "MEMOIZE": _Machine._memoize,
    "APPEND": _Machine._append,
    "TUPLE": _Machine._tuple,
    "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3),
    "EMPTY_DICT": lambda machine, _: machine.stack.append(Dictionary()),
    "DICT": _Machine._dictionary,
    "SETITEM": _Machine._set_item,
    "SETITEMS": lambda machine, _: machine._set(machine._after_mark()),
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "NEWOBJ_EX": _Machine._call_with_names,
    "BUILD": _Machine._build,
}
