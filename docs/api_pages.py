"""Writes the pages of docs/api from docstrings: `python -m docs.api_pages`. A test keeps them current.

The sources are parsed and not imported, so this needs neither torch nor any other package.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.api_names import MADE_BY, PAGES, Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_zpp"
FOLDER = ROOT / "docs" / "api"
WIDTH = 100  # of signatures, in characters
NOTE = "Generated from docstrings by `python -m docs.api_pages`; a test keeps it current."

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Entry:
    """A name of the list, and where it is defined. methods: those of the page, none for a constant or a function."""

    file: str
    name: str
    definition: Definition
    methods: tuple[ast.FunctionDef, ...] = ()

    @property
    def module(self) -> str:
        """The module to import the name from."""
        return "megatron_zpp." + self.file.removesuffix(".py").replace("/", ".")


@cache
def definitions(file: str) -> dict[str, Definition]:
    """What a file below megatron_zpp/ defines at its top, by name."""
    found: dict[str, Definition] = {}
    for node in ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def entry(listed: str) -> Entry:
    """The entry of a listed name. Raises ValueError for a name or a method that is not defined."""
    place, *chosen = listed.split()
    file, name = place.split(":")
    definition = definitions(file).get(name)
    if definition is None:
        raise ValueError(f"megatron_zpp/{file} has no {name}, which docs/api_names.py lists; correct the list")
    own = {node.name: node for node in getattr(definition, "body", ()) if isinstance(node, ast.FunctionDef)}
    if not chosen:
        chosen = [method for method, node in own.items() if not method.startswith("_") and ast.get_docstring(node)]
    missing = [method for method in chosen if method != "-" and method not in own]
    if missing:
        raise ValueError(f"{name} in megatron_zpp/{file} has no {missing[0]}, which docs/api_names.py lists; correct the list")
    return Entry(file, name, definition, tuple(own[method] for method in chosen if method != "-"))


def pages() -> dict[str, str]:
    """The text of every page by its file name."""
    return {page.file: page_text(page) for page in PAGES}


def page_text(page: Page) -> str:
    """The text of a page, with a newline at its end."""
    sections = [_section(entry(listed)) for listed in page.names]
    return "\n\n".join([f"# {page.title}", NOTE, page.introduction, *sections]) + "\n"


def _section(found: Entry) -> str:
    definition = found.definition
    source = f"Defined in [megatron_zpp/{found.file}](../../megatron_zpp/{found.file})."
    declaration = _declaration(definition, found.file)
    blank = "\n\n" if declaration.startswith("class ") else "\n"  # as ruff lays out code in Markdown
    parts = [f"## {found.name}", _code(f"from {found.module} import {found.name}\n{blank}{declaration}")]
    if isinstance(definition, ast.FunctionDef | ast.ClassDef):
        parts += _prose(ast.get_docstring(definition) or "", parameters_of(definition))
    if found.name in MADE_BY:
        maker = MADE_BY[found.name]
        parts.append(f"Made by [{maker}](#{maker}).")
    parts.append(source)
    for method in found.methods:
        parts += [f"### {found.name}.{method.name}", _code(_method(found.name, method))]
        parts += _prose(ast.get_docstring(method) or "", parameters_of(method))
    return "\n\n".join(parts)


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def parameters_of(definition: Definition) -> list[str]:
    """The parameters of a function; the fields of a class, the parameters of its constructor and the attributes that it sets."""
    if isinstance(definition, ast.FunctionDef):
        given = definition.args
        optional = [argument for argument in (given.vararg, given.kwarg) if argument is not None]
        return [argument.arg for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs, *optional] if argument.arg != "self"]
    if not isinstance(definition, ast.ClassDef):
        return []
    names = [_target(node) for node in definition.body if isinstance(node, ast.AnnAssign | ast.Assign)]
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            names += [*parameters_of(node), *(found.attr for found in ast.walk(node) if isinstance(found, ast.Attribute))]
        elif isinstance(node, ast.FunctionDef):
            names.append(node.name)
    return names


def _target(node: ast.AnnAssign | ast.Assign) -> str:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return ast.unparse(target)


def _declaration(definition: Definition, file: str) -> str:
    """The signature of a function, the fields of a class or the call that makes an object of it, or the value of a constant."""
    if isinstance(definition, ast.FunctionDef):
        return signature(definition.name, definition)
    if not isinstance(definition, ast.ClassDef):
        return _lines(definition, file)
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign | ast.Assign) and not _target(node).startswith("_")]
    made = next((node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
    bases = ", ".join(ast.unparse(base) for base in definition.bases)
    head = f"class {definition.name}({bases})" if bases else f"class {definition.name}"
    if made is not None and definition.name not in MADE_BY and not bases.endswith("Error"):
        return signature(definition.name, made, has_result=False)
    lines = [_lines(node, file) for node in fields]
    return f"{head}:\n" + "\n".join(lines) if lines else head


def _method(owner: str, definition: ast.FunctionDef) -> str:
    """The signature of a method, with its class before it if it is called on the class, or the type of a property."""
    marks = [ast.unparse(mark) for mark in definition.decorator_list]
    if any(mark.endswith("property") for mark in marks):
        return f"{definition.name}: {_unparsed(definition.returns)}"
    is_of_class = "classmethod" in marks or "staticmethod" in marks
    return signature(f"{owner}.{definition.name}" if is_of_class else definition.name, definition)


def _lines(node: ast.stmt, file: str) -> str:
    """The lines of the source that hold a statement, with its comment."""
    lines = (PACKAGE / file).read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[node.lineno - 1 : node.end_lineno])


def signature(name: str, definition: ast.FunctionDef, *, has_result: bool = True) -> str:
    """A call of a function with all of its parameters except the object; in several lines if it is longer than WIDTH."""
    given = definition.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    bound = int(bool(positional) and positional[0].arg in ("self", "cls"))
    parts = [_parameter(argument, default) for argument, default in zip(positional[bound:], defaults[bound:], strict=True)]
    if len(given.posonlyargs) > bound:
        parts.insert(len(given.posonlyargs) - bound, "/")
    if given.vararg is not None:
        parts.append("*" + _parameter(given.vararg, None))
    elif given.kwonlyargs:
        parts.append("*")
    parts += [_parameter(argument, default) for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg is not None:
        parts.append("**" + _parameter(given.kwarg, None))
    result = f" -> {_unparsed(definition.returns)}" if has_result else ""
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    annotated = f"{argument.arg}: {_unparsed(argument.annotation)}"
    return annotated if default is None else f"{annotated} = {_unparsed(default)}"


def _unparsed(node: ast.expr | None) -> str:
    return "None" if node is None else ast.unparse(node).replace("'", '"')


# ---- docstrings


def _prose(docstring: str, parameters: list[str]) -> list[str]:
    """A docstring as blocks of Markdown: paragraphs, lists of parameters, and drawings as they are."""
    blocks: list[str] = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines):
            blocks.append("```text\n" + "\n".join(line[4:] for line in lines) + "\n```")
            continue
        for block in _paragraph(lines, parameters):
            if block.startswith("- ") and blocks and blocks[-1].startswith("- "):
                blocks[-1] += f"\n{block}"
            else:
                blocks.append(block)
    return blocks


def _paragraph(lines: list[str], parameters: list[str]) -> list[str]:
    """A paragraph as blocks. A hyphen begins an item, and so do names of parameters and a colon, and any name in the indented lines of one.

    What is raised or returned is a block of its own.
    """
    known = "|".join(map(re.escape, parameters)) or "(?!)"
    item = rf"(?:{known})(?:, (?:{known}))*: "
    blocks = [""]
    for line in lines:
        text, is_in_item = line.strip(), blocks[-1].startswith("- ")
        if is_in_item and re.match(r" {4}\w+: ", line):
            blocks[-1] += "\n  - " + re.sub(r"^(\w+):", r"`\1`:", text)
        elif line.startswith("- ") or re.match(item, line) or (is_in_item and re.match(r"(Raises|Returns) ", line)):
            blocks.append(_named(text, item))
        else:
            blocks[-1] += " " * bool(blocks[-1]) + text
    return [_named(part.strip(), item) for block in blocks for part in _parts(block, item) if part.strip()]


def _parts(block: str, item: str) -> list[str]:
    """A block, cut where a sentence begins with a parameter, and before what such a sentence raises."""
    parts = re.split(rf"(?<=[.)] )(?={item})", block)
    split = [
        re.split(r"(?<=\. )(?=Raises )", part, maxsplit=1) if part.startswith("- ") or re.match(item, part) else [part] for part in parts
    ]
    return [text for texts in split for text in texts]


def _named(text: str, item: str) -> str:
    """A sentence as an item with its names as code, if it begins with parameters."""
    found = re.match(item, text)
    if found is None:
        return text
    return "- " + ", ".join(f"`{name}`" for name in found[0][:-2].split(", ")) + f": {text[found.end() :]}"


def main() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
