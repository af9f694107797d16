"""What a resumed run is told if it is not the one that was begun."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.data.preprocess.journal import Journal, Progress
from megatron_zpp.system.user_error import UserError

CHANGES = {
    "a value": (
        {"vocab_size": 1000},
        {"vocab_size": 1001},
        "had --vocab-size 1000, this command has --vocab-size 1001; give --vocab-size 1000, or",
    ),
    "a list": (
        {"json_keys": ["a", "b"]},
        {"json_keys": ["a"]},
        "had --json-keys a b, this command has --json-keys a; give --json-keys a b, or",
    ),
    "a switch": (
        {"append_eod": False},
        {"append_eod": True},
        "had no --append-eod, this command has --append-eod; leave --append-eod out, or",
    ),
    "a file": (
        {"vocab_file": "12"},
        {"vocab_file": "34"},
        "had --vocab-file with the content of sha256 12, this command has --vocab-file with the content of sha256 34; give --vocab-file",
    ),
    "a later flag": (
        {},
        {"null_tokenizer_eod_id": 0},
        "had no --null-tokenizer-eod-id, this command has --null-tokenizer-eod-id 0; leave --null-tokenizer-eod-id out, or",
    ),
    "the old tokenizer": (
        {},
        {"legacy_tokenizer": False},
        "had --legacy-tokenizer (or was begun before this flag existed), this command has no --legacy-tokenizer; give --legacy",
    ),
    "today's tokenizer": (
        {"legacy_tokenizer": False},
        {},
        "had no --legacy-tokenizer, this command has --legacy-tokenizer; leave --legacy-tokenizer out, or",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_that_cannot_go_on_names_the_flag_to_give_or_to_leave_out(tmp_path: Path, change: str) -> None:
    before, now, message = CHANGES[change]
    journal(tmp_path, before).save(Progress())
    with pytest.raises(UserError, match=f"^--resume: the earlier run {re.escape(message)}"):
        journal(tmp_path, now).load()
    assert journal(tmp_path, before).load() == Progress()


def journal(folder: Path, settings: dict[str, Any]) -> Journal:
    return Journal(str(folder / "out"), [], settings)
