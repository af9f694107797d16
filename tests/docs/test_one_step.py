"""One step can be read in an evening: docs/one_step.md leads through all of its files, and they are few and short."""

from __future__ import annotations

import re

from harness.places import ROOT

MOST_FILES, MOST_LINES = 20, 3500
PAGE = (ROOT / "docs" / "one_step.md").read_text(encoding="utf-8")
STEP = PAGE.split("## The step\n")[1].split("\n## ")[0]
TABLE = {file: int(lines) for file, lines in re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", STEP, re.MULTILINE)}


def lines_of(file: str) -> int:
    return len((ROOT / "megatron_zpp" / file).read_text(encoding="utf-8").splitlines())


def test_the_step_is_at_most_20_files_and_3500_lines() -> None:
    assert len(TABLE) <= MOST_FILES
    assert sum(map(lines_of, TABLE)) <= MOST_LINES


def test_the_walk_names_the_files_of_its_table_and_no_others() -> None:
    walk = STEP[STEP.index("```") :]
    assert set(re.findall(r"\w+/\w+\.py", walk)) == set(TABLE)


def test_the_lines_of_the_table_are_about_those_of_the_files() -> None:
    for file, lines in TABLE.items():
        assert abs(lines - lines_of(file)) <= max(25, lines // 4), file
