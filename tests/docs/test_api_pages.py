"""docs/api: every listed name exists, its docstring says what comes back, and the pages are those that the docstrings make."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from api_names import PAGES, Page
from api_pages import FOLDER, entry, pages, parameters_of

SENTENCE = re.compile(r"[A-Z`'\[(\d].*[.:]$|[a-z]\w+ \[.*[.:]$", re.DOTALL)  # it may begin with a shape: loss_BQ ...


def documented(page: Page) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef, list[str]]]:
    """The names of a page and their methods: each with its definition and the parameters that its docstring may explain."""
    for found in map(entry, page.names):
        if isinstance(found.definition, ast.FunctionDef | ast.ClassDef):  # a constant is shown as it is written
            own = parameters_of(found.definition)
            yield found.name, found.definition, own
            for method in found.methods:
                yield f"{found.name}.{method.name}", method, [*parameters_of(method), *own]


def test_no_name_is_listed_twice() -> None:
    names = [listed.split()[0] for page in PAGES for listed in page.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_a_listed_name_has_a_docstring_whose_first_line_is_a_sentence(page: Page) -> None:
    for name, definition, _ in documented(page):
        first_paragraph = (ast.get_docstring(definition) or "").split("\n\n")[0]
        assert SENTENCE.match(first_paragraph), f"{name}: {first_paragraph!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_a_parameter_that_a_docstring_explains_exists(page: Page) -> None:
    for name, definition, parameters in documented(page):
        for explained in re.findall(r"^((?:[a-z_]\w*)(?:, [a-z_]\w*)*): ", ast.get_docstring(definition) or "", re.MULTILINE):
            assert set(explained.split(", ")) <= set(parameters), f"{name}: {explained}"


def test_a_name_that_is_not_defined_is_refused() -> None:
    with pytest.raises(ValueError, match="has no unshard, which docs/api_names.py lists; correct the list"):
        entry("zero/shard.py:unshard")
    with pytest.raises(ValueError, match="ZeroEngine in megatron_zpp/zero/engine.py has no forward"):
        entry("zero/engine.py:ZeroEngine backward forward")


def test_the_stored_pages_are_what_the_docstrings_make() -> None:
    made = pages()
    assert {path.name for path in FOLDER.glob("*.md")} == set(made)
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: run python docs/api_pages.py"
