"""Writes the tables of README and docs that come from benchmarks/results or from plans: `python -m docs.page_tables`.

A page has a place for a table by its name; the lines between are written anew. A test keeps them current.

    <!-- table: NAME -->

    <!-- end of table -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from docs.tables import plans, results

ROOT = Path(__file__).resolve().parents[1]

TABLES: dict[str, Callable[[], str]] = results.TABLES | plans.TABLES
PLACE = re.compile(r"^<!-- table: (\w+) -->\n(.*?)^<!-- end of table -->$", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "benchmarks/README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


def names_of(text: str) -> list[str]:
    """The tables of a page."""
    return [name for name, _ in PLACE.findall(text)]


def filled(text: str) -> str:
    """A page with its tables as they are today. Raises KeyError for a name that is not in TABLES."""
    return PLACE.sub(lambda place: f"<!-- table: {place[1]} -->\n\n{TABLES[place[1]]()}\n\n<!-- end of table -->", text)


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        if (current := filled(text)) != text:
            path.write_text(current, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
