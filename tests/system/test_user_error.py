"""A mistake of the user is known by its type, wherever it is found."""

from __future__ import annotations

from harness.places import ROOT

OPERATORS = "megatron_zpp/ops"  # arguments of operators come from this program, so what they refuse is a bug


def test_what_the_program_refuses_of_a_user_is_a_user_error() -> None:
    files = [path for folder in ("megatron_zpp", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = [path for path in files if "raise ValueError" in path.read_text(encoding="utf-8")]
    assert len(files) > 300 and all(path.is_relative_to(ROOT / OPERATORS) for path in found), found
