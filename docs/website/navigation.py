"""The navigation of the site: the headings and links of docs/index.md, in their order.

Pages that it does not name are reached by links only.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
INDEX = "docs/index.md"
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")  # pages that are not in docs/
SOURCES = (".py", ".sh")  # shown as pages; files of other kinds are downloads
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)#\s]*)(#[^)\s]+)?\)")


class Target(NamedTuple):
    """A link to a file of the repository. path: from the root. anchor: with its #, empty for a whole file."""

    text: str
    path: str
    anchor: str


class Group(NamedTuple):
    """A heading of the index, and the pages below it."""

    title: str
    pages: tuple[Target, ...]


def pages() -> list[str]:
    """The paths of all pages with text."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/results/*.md")]
    return [*OUTSIDE, *sorted(path.relative_to(ROOT).as_posix() for path in found)]


def links(page: str) -> list[Target]:
    """The links of a page to files of the repository and to headings, in their order, without those in code."""
    return _links_in(re.sub(r"`([^`\n]+)`", lambda code: re.sub(r"[][()]", "", code[1]), text_of(page)), page)


def text_of(page: str) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _links_in(text: str, page: str) -> list[Target]:
    folder = posixpath.dirname(page)
    return [
        Target(label, posixpath.normpath(posixpath.join(folder, path)) if path else page, anchor)
        for label, path, anchor in LINK.findall(text)
    ]


def groups() -> list[Group]:
    """The groups of the index. A page belongs to the first group that names it; links to a heading do not count."""
    named: set[str] = set()
    found = []
    for section in re.split(r"^## ", (ROOT / INDEX).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        targets = [link for link in _links_in(text, INDEX) if link.path.endswith(".md") and not link.anchor and link.path not in named]
        named.update(link.path for link in targets)
        found.append(Group(title.strip(), tuple(targets)))
    return found


def linked_sources() -> list[str]:
    """The source files to which pages link."""
    return sorted({link.path for page in pages() for link in links(page) if link.path.endswith(SOURCES)})


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _add_navigation)
    app.connect("source-read", _add_title)
    app.connect("doctree-read", _mark_unlisted)
    return {"parallel_read_safe": True}


def _add_navigation(app: Sphinx, page: str, content: list[str]) -> None:
    if page != app.config.root_doc:
        return
    for group in groups():
        entries = "\n".join(f"{link.text} </{link.path.removesuffix('.md')}>" for link in group.pages)
        content[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {group.title}\n\n{entries}\n```\n"


def _add_title(app: Sphinx, page: str, content: list[str]) -> None:
    """Results that programs have printed have no title; it is the path of the file."""
    if page.startswith("benchmarks/results/") and not content[0].startswith("# "):
        content[0] = f"# {page}.md\n\n{content[0]}"


def _mark_unlisted(app: Sphinx, doctree: object) -> None:
    """Lets pages that are in no group be built without a warning. tests/docs/test_site.py checks that every document is in one."""
    listed = {link.path for group in groups() for link in group.pages}
    page = app.env.docname
    if f"{page}.md" not in listed and page != app.config.root_doc:
        app.env.metadata[page]["orphan"] = ""
    if app.env.doc2path(page, base=False).suffix in SOURCES:
        app.env.metadata[page]["nosearch"] = ""
