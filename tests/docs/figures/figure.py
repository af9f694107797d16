"""A figure is a part of a sentence or table with places for numbers, and the values that stand there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from harness.places import ROOT

CODE = re.compile(r"^```.*?^```$|^ {4}(?! *(?:[-*]|\d+\.) )[^\n]*$|`[^`]*`|\]\([^)]*\)|<[^>]*>", re.MULTILINE | re.DOTALL)
# Numbers that belong to a name: versions, models, papers, the headings of CHANGELOG.md.
NAME = re.compile(r"arXiv [\d.]+|(?:[Tt]orch|Python|NCCL|GCC|License|Llama|Qwen2?|##) \d[\d.]*\w*")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"(?:[KMGT]i?B(?:/s)?|[kKMGT]bit/s|[nµump]?s|min|(?:micro|milli|nano)?seconds?|minutes?|hours?|%|percent|times|nats|tokens per second"
    r"|x(?! ?[\d(])|TFLOP/s|CPU s)(?![\w-])"
)
MEASURED = re.compile(
    rf"(?<![\w.]){NUMBER}(?: (?:to|and|or|±) {NUMBER})* ?{UNIT}|(?<![\w.])\d[\d,]*\.\d+(?!\w|\.\d)|(?<![\w.])\d[\d.]*e-?\d+"
)
SAYS = dict(enumerate("no one two three four five six seven eight nine ten".split()))


@dataclass(frozen=True)
class Figure:
    """words: a part of the page, in which each place of str.format has a value. values: computed from results or from a plan."""

    page: str
    words: str
    values: Callable[[], Iterable[object]]

    @property
    def text(self) -> str:
        return as_one_line(self.words.format(*self.values()))


@dataclass(frozen=True)
class Elsewhere:
    """Numbers that another test compares. pattern: matches them on one line of text. test: FILE::FUNCTION below tests/."""

    page: str
    pattern: str
    test: str


@dataclass(frozen=True)
class NotMeasured:
    """A part of the page with numbers that nobody measured. kind: why it needs no results."""

    page: str
    words: str
    kind: str


def as_one_line(text: str) -> str:
    return " ".join(text.split())


@cache
def text_of(page: str) -> str:
    """The page on one line."""
    return as_one_line((ROOT / page).read_text(encoding="utf-8"))


def without_code(text: str) -> str:
    return as_one_line(NAME.sub(" ~ ", CODE.sub(" ` ", text)))


@cache
def prose_of(page: str) -> str:
    """The page on one line; numbers in code, in names, in targets of links and in tags do not count as measured, and are left out."""
    return without_code((ROOT / page).read_text(encoding="utf-8"))


def left_over(text: str, covered: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The numbers of a page that look measured and are in no part of `covered`, with the words around them. text: of prose_of."""
    parts = [re.escape(without_code(words)) for words in covered]
    spans = [found.span() for part in (*parts, *patterns) for found in re.finditer(part, text)]
    return [
        text[max(0, found.start() - 60) : found.end() + 30]
        for found in MEASURED.finditer(text)
        if not any(start <= found.start() and found.end() <= end for start, end in spans)
    ]
