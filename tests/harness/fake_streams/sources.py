"""The lines of the package that order streams, read from its sources: those that a test has to reach."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from harness.fake_streams.machine import ROOT, Site

ORDERING = ("record_event", "wait_event", "wait_stream", "synchronize")


def ordering_lines() -> dict[str, set[Site]]:
    """By name of the file, the calls that record or wait, without those of torch.cuda itself."""
    found: dict[str, set[Site]] = {}
    for path in (ROOT / "megatron_zpp").rglob("*.py"):
        text = path.read_text()
        if any(call in text for call in ORDERING):
            for site in _calls(text, path.name):
                found.setdefault(path.name, set()).add(site)
    return found


def _calls(text: str, file: str) -> Iterator[Site]:
    for node in ast.walk(ast.parse(text)):
        method = node.func if isinstance(node, ast.Call) else None
        if isinstance(method, ast.Attribute) and method.attr in ORDERING and ast.unparse(method.value) != "torch.cuda":
            yield Site(method.attr, file, method.lineno)
