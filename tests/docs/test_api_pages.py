"""docs/api: every listed name exists, its docstring says what comes back, and the pages are those that the docstrings make."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from docs.api_names import MADE_BY, PAGES, Page
from docs.api_pages import FOLDER, entry, pages, parameters_of, signature

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


@pytest.mark.parametrize(
    "written",
    [
        'call(first: int, /, second: str = "a", *others: int, third: bool, fourth: float = 0.5, **more: Any) -> None',
        "call(first: int = 1, second: int = 2, /, *, third: int) -> int",
        "call(*others: int) -> int",
        "call(**more: int) -> int",
    ],
)
@pytest.mark.parametrize("owner", ["", "self, ", "cls, "])
def test_a_signature_is_shown_as_it_is_written_without_the_object(written: str, owner: str) -> None:
    definition = ast.parse(f"def {written.replace('(', f'({owner}', 1)}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    assert re.sub(r"\n *", "", signature("call", definition)).replace(",)", ")").replace(",", ", ").replace(",  ", ", ") == written


def test_what_users_call_is_shown_and_not_a_constructor_that_they_do_not_call() -> None:
    made = pages()
    assert "__init__" not in "".join(made.values())
    assert "\nIndexedDataset(prefix: str)\n" in made["data.md"] and "\nclass ZeroEngine\n" in made["sharding.md"]
    assert "Made by [shard](#shard)." in made["sharding.md"] and "\nCode.gaussian(bits: int, rounds: int) -> Code\n" in made["policies.md"]


def test_a_class_whose_constructor_is_not_shown_has_a_function_on_its_page_that_returns_it() -> None:
    for page in PAGES:
        found = {one.name: one for one in map(entry, page.names)}
        for made, maker in MADE_BY.items():
            if made in found:
                definition = found[maker].definition
                assert isinstance(definition, ast.FunctionDef) and definition.returns is not None
                assert ast.unparse(definition.returns) == made
    assert set(MADE_BY) <= {listed.split()[0].split(":")[1] for page in PAGES for listed in page.names}


def test_rules_that_begin_with_hyphens_are_a_list() -> None:
    assert "must keep these rules:\n\n- It is immutable" in pages()["codecs.md"]


def test_an_error_that_a_listed_function_raises_itself_is_in_its_docstring() -> None:
    for page in PAGES:
        for name, definition, _ in documented(page):
            if isinstance(definition, ast.FunctionDef):
                thrown = [node.exc for node in ast.walk(definition) if isinstance(node, ast.Raise)]
                errors = {ast.unparse(node.func) for node in thrown if isinstance(node, ast.Call)}
                assert all(error in (ast.get_docstring(definition) or "") for error in errors), f"{name} raises {errors}"


def test_the_stored_pages_are_what_the_docstrings_make() -> None:
    made = pages()
    assert {path.name for path in FOLDER.glob("*.md")} == set(made)
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: run python -m docs.api_pages"
