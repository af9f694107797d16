"""Shows a source file to which a page links as a page: its path, and its text in colours."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from pygments.lexers import BashLexer
from sphinx.application import Sphinx
from sphinx.parsers import Parser

from docs.website.navigation import ROOT

LANGUAGES = {".py": "python", ".sh": "bash"}


class SourceFile(Parser):
    """Reads any text file."""

    supported = ("source_file",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        path = Path(document["source"])
        section = nodes.section("", nodes.title("", path.relative_to(ROOT).as_posix()), ids=["source"])
        section += nodes.literal_block(inputstring, inputstring, language=LANGUAGES[path.suffix])
        document += section


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_source_parser(SourceFile)
    app.add_lexer("flags", BashLexer)  # the language of docs/architectures.md
    for suffix in LANGUAGES:
        app.add_source_suffix(suffix, "source_file")
    return {"parallel_read_safe": True}
