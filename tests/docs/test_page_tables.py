"""The tables of the pages are those of results and plans, and what sentences say of them stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import PurePosixPath

import pytest
from harness.pages import PAGES, text_of
from harness.places import ROOT

from docs import page_tables

pytestmark = pytest.mark.pure

# Numbers that belong to a name: versions, models, papers.
NAME = re.compile(r"arXiv [\d.]+|(?:[Tt]orch|Python|NCCL|GCC|License|DeepSpeed|Llama|Qwen2?|##) \d[\d.]*\w*")
CODE = re.compile(r"```.*?^```$|^ {4}(?! *(?:[-*]|\d+\.) )[^\n]*$|`[^`]*`", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
# What looks measured: a decimal number, a share, and a number of times.
RANGE = r"(?: (?:to|and|or|±) \d[\d.]*)*"
CLAIM = re.compile(rf"(?<![\w.])\d[\d,]*\.\d+(?!\w|\.\d)|(?<![\w.])\d[\d,]*(?:\.\d+)?(?={RANGE}(?: ?%| times|x)(?![\w-]))")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
EXEMPT = ("docs/worked_example.md",)  # test_worked_example.py computes its numbers
FORMULA, INTERVAL = "(0.5 + 0.25", "95 % interval"
# Parts of pages with numbers that nobody measured: definitions, limits, defaults, arithmetic on the numbers beside them, data sheets.
NOT_MEASURED = {
    "README.md": [FORMULA, INTERVAL],
    "benchmarks/README.md": ["the aim is 90 %"],
    "docs/architectures.md": ["which says 175.0 billion"],
    "docs/coming_from_deepspeed.md": ["hidden dropout is 0.1"],
    "docs/data.md": [", 3 or 3.5,"],
    "docs/datasets.md": ["0.005 as in Megatron"],
    "docs/flags_that_matter.md": ["dropout, 0.1 each"],
    "docs/islands.md": [
        "at most 0.7; 0.9",
        "two replicas end 0.7 %",
        "0.2 % with 1.3 billion",
        "at 2.4 billion; four end 2.0, 0.5 and 0.3 %",
    ],
    "docs/launching.md": ["(default 0.1)"],
    "docs/long_runs.md": ["60 to 80 %"],
    "docs/numerics.md": [INTERVAL, "from p = 2^-20 to 0.999"],
    "docs/slow_links.md": [FORMULA, "can exceed 100 %", "Headers take 4.4 %", "at least 1 % of the parameters", "more than 10 % off"],
    "docs/zeropp.md": [FORMULA, INTERVAL],
}


def sections(page: str) -> list[tuple[list[str], str]]:
    """The parts of a page below headings of its first two levels, each with the names of all headings in it."""
    text = text_of(page)
    starts = [0, *(found.start() for found in HEADING.finditer(text) if len(found[1]) <= 2), len(text)]
    parts = [text[start:end] for start, end in pairwise(starts)]
    return [([_slug(found[2]) for found in HEADING.finditer(part)], part) for part in parts]


def _slug(heading: str) -> str:
    """The name by which a link names a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


@cache
def shown(page: str, heading: str) -> frozenset[str]:
    """The numbers in the tables of a section, or of all sections; of a file of results, all numbers."""
    if page.startswith("benchmarks/results/"):
        return frozenset(NUMBER.findall(text_of(page)))
    text = "".join(part for headings, part in sections(page) if not heading or heading in headings)
    return frozenset(NUMBER.findall("\n".join(table for _, table in page_tables.PLACE.findall(text))))


def claims(page: str) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Every number of a sentence that looks measured, the words around it, and the numbers that it may come from."""
    for headings, part in sections(page):
        for paragraph in re.split(r"\n\n|\n(?=\|)", CODE.sub("`", page_tables.PLACE.sub("", part))):
            here = shown(page, headings[0]) if headings else frozenset()
            sources = here.union(*(shown(*target) for target in _targets(page, paragraph)))
            words = NAME.sub("~", LINK.sub("]", " ".join(paragraph.split())))
            for claim in CLAIM.finditer(words):
                yield claim[0], words[max(0, claim.start() - 60) : claim.end() + 30], sources


def _targets(page: str, paragraph: str) -> Iterator[tuple[str, str]]:
    """Pages and files of results that a paragraph links, with the heading."""
    for link in LINK.findall(paragraph):
        path, _, heading = link.partition("#")
        if link.startswith("http") or (path and not path.endswith(".md")):
            continue
        target = (ROOT / PurePosixPath(page).parent / path).resolve() if path else ROOT / page
        yield str(target.relative_to(ROOT)), heading


def stands_in(claim: str, sources: frozenset[str]) -> bool:
    """Whether a number of the sources, rounded to as many digits, is the claim."""
    digits = len(claim.partition(".")[2])
    return any(f"{abs(float(number.replace(',', ''))):.{digits}f}" == claim.replace(",", "") for number in sources)


@pytest.mark.parametrize("page", page_tables.PAGES)
def test_the_tables_of_a_page_are_those_of_results_and_plans(page: str) -> None:
    assert text_of(page) == page_tables.filled(text_of(page)), "run python -m docs.page_tables"


def test_every_table_is_on_one_page() -> None:
    names = [name for page in page_tables.PAGES for name in page_tables.names_of(text_of(page))]
    assert sorted(names) == sorted(page_tables.TABLES)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in EXEMPT])
def test_a_number_that_looks_measured_stands_in_a_table_beside_it_or_one_that_it_links(page: str) -> None:
    given = NOT_MEASURED.get(page, [])
    left = [words for claim, words, sources in claims(page) if not stands_in(claim, sources) and not any(part in words for part in given)]
    assert not left


def test_a_number_that_stands_nowhere_is_found() -> None:
    assert stands_in("6.5", frozenset({"6.51"})) and stands_in("9", frozenset({"-9.4"})) and stands_in("1,024", frozenset({"1024"}))
    assert not stands_in("6.5", frozenset({"6.41", "65"}))
    for number in ("2x", "0.30 ± 0.19 %", "3 to 4 times", "1.56"):
        assert CLAIM.search(f"Block 7 of 32 takes {number}.")
    assert not CLAIM.search("Block 7 of 32 has 4 heads, 2.5M and torch.x 4 x 2.")


def test_what_is_not_measured_is_still_on_its_page() -> None:
    missing = [part for page, parts in NOT_MEASURED.items() for part in parts if part not in " ".join(text_of(page).split())]
    assert not missing
