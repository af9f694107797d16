"""Reads the text of a PTX module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

BYTES_OF = {"8": 1, "16": 2, "32": 4, "64": 8}
ENTRY = re.compile(r"^\.(?:visible \.|weak \.)?entry (?P<name>\w+)\(", re.MULTILINE)
PARAMETER = re.compile(r"\.param (?:\.align (?P<align>\d+) )?\.[a-z](?P<bits>\d+) (?P<name>\w+)(?:\[(?P<count>\d+)\])?")
SHARED = re.compile(r"^\.shared \.align (?P<align>\d+) \.b8 (?P<name>\w+)\[(?P<bytes>\d+)\];", re.MULTILINE)
LABEL = re.compile(r"(?P<name>\$\w+):")
STATEMENT = re.compile(r"(?:@(?P<not>!?)(?P<guard>%p\d+)\s+)?(?P<op>[a-z_][\w.]*)\s*(?P<operands>.*)", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]|]+")
BLANKS_AND_BRACES = " \t\n{}"
# Declarations, hints to the compiler, and the parameters of __assertfail.
NO_INSTRUCTIONS = (".reg", ".param", ".pragma", "st.param")


@dataclass(frozen=True)
class Place:
    """Of a parameter or of a variable in shared memory: its first byte, and its size."""

    start: int
    nbytes: int


class Instruction(NamedTuple):
    """guard: the predicate that must be true, or false with is_negated; empty for none."""

    op: str
    operands: tuple[str, ...]
    guard: str
    is_negated: bool


@dataclass(frozen=True)
class Kernel:
    name: str
    parameters: Sequence[Place]
    places: Mapping[str, Place]  # of parameters and shared variables, by name
    shared_bytes: int
    instructions: Sequence[Instruction]
    labels: Mapping[str, int]  # to the index of the next instruction


class Module:
    def __init__(self, text: str) -> None:
        self._text = re.sub(r"//[^\n]*", "", text)

    @cached_property
    def names(self) -> list[str]:
        return [match["name"] for match in ENTRY.finditer(self._text)]

    @cached_property
    def _shared(self) -> dict[str, Place]:
        return _placed((match["name"], int(match["align"]), int(match["bytes"])) for match in SHARED.finditer(self._text))

    def kernel(self, name: str) -> Kernel:
        begin = self._text.index(f".entry {name}(")
        head, body = self._text[begin : self._text.index("\n}\n", begin)].split("\n{\n", 1)
        parameters = _placed(
            (match["name"], int(match["align"] or BYTES_OF[match["bits"]]), int(match["count"] or 1) * BYTES_OF[match["bits"]])
            for match in PARAMETER.finditer(head)
        )
        shared_bytes = max((place.start + place.nbytes for place in self._shared.values()), default=0)
        return Kernel(name, list(parameters.values()), {**self._shared, **parameters}, shared_bytes, *_instructions(body))


def _placed(sizes: Iterator[tuple[str, int, int]]) -> dict[str, Place]:
    """Places one after the other, for names with alignment and bytes."""
    places, end = {}, 0
    for name, align, nbytes in sizes:
        places[name] = Place(-(-end // align) * align, nbytes)
        end = places[name].start + nbytes
    return places


def _instructions(body: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for text in body.split(";"):
        # Leading braces are those of blocks, and of assembler in the sources; a list of registers stands behind an operation.
        statement = text.lstrip(BLANKS_AND_BRACES).rstrip()
        while (match := LABEL.match(statement)) is not None:
            labels[match["name"]] = len(instructions)
            statement = statement[match.end() :].lstrip(BLANKS_AND_BRACES)
        if not statement or statement.startswith(NO_INSTRUCTIONS):
            continue
        found = STATEMENT.fullmatch(statement)
        if found is None:
            raise ValueError(f"{statement!r} is no statement of PTX that is known here")
        operands = tuple(OPERAND.findall(found["operands"]))
        instructions.append(Instruction(found["op"], operands, found["guard"] or "", bool(found["not"])))
    return instructions, labels
