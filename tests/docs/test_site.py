"""The site: every document is in the index and in the navigation, and every link and anchor leads somewhere, on GitHub too."""

from __future__ import annotations

import re
from functools import cache

import pytest
from harness.pages import FENCED
from harness.places import ROOT

from docs.website.navigation import INDEX, OUTSIDE, groups, links, pages, text_of

PAGES = pages()


@cache
def anchors(page: str) -> frozenset[str]:
    """The anchors that GitHub and the site give to the headings of a page: letters in lower case, without punctuation, with hyphens."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.+?) *$", text_of(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found[anchor] = found.get(anchor, 0) + 1
    return frozenset(f"#{name}-{number}" if number else f"#{name}" for name, count in found.items() for number in range(count))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_every_anchor_to_a_heading_and_every_picture_to_its_file(page: str) -> None:
    for link in links(page):
        assert (ROOT / link.path).exists(), link
        assert not link.anchor or link.anchor in anchors(link.path), link
    for path in re.findall(r'(?:src|srcset)="([^"]+)"|!\[[^\]]*\]\(([^)]+)\)', text_of(page)):
        assert (ROOT / page).parent.joinpath("".join(path)).is_file(), path


@pytest.mark.parametrize("page", PAGES)
def test_a_block_says_what_it_is_because_the_site_wraps_all_but_drawings(page: str) -> None:
    assert [block for language, block in FENCED.findall(text_of(page)) if not language] == []


def test_a_document_has_one_title_at_its_top() -> None:
    for page in PAGES:
        titles = [place for place, line in enumerate(text_of(page).splitlines()) if line.startswith("# ")]
        assert titles == [0] or page.startswith("benchmarks/results/"), page


def test_every_document_is_in_the_index_and_so_in_the_navigation() -> None:
    listed = [link.path for group in groups() for link in group.pages]
    documents = {page for page in PAGES if page.startswith("docs/")} - {INDEX}
    assert set(listed) == documents.union(OUTSIDE)
    assert len(listed) == len(set(listed))


def test_every_group_of_the_index_names_pages_by_different_texts() -> None:
    texts = [link.text for group in groups() for link in group.pages]
    assert len(texts) == len(set(texts))
    assert all(group.pages for group in groups())
