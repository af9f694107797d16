"""What the page of missing features says is refused is refused, with the message that it quotes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from harness.places import ROOT

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve

PAGE = (ROOT / "docs" / "not_done.md").read_text(encoding="utf-8")
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1 --train-iters 1".split()
RANKS = 4
ROWS = re.findall(r"^\| [^|]+ \| (`[^|]+`) \| ([^|]+) \|", PAGE, re.MULTILINE)
CASES = [(words, message) for cell, message in ROWS for words in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize(("words", "message"), CASES)
def test_what_is_missing_is_refused_with_its_message(words: str, message: str, tmp_path: Path) -> None:
    given = shlex.split(words)
    if words.startswith("{"):
        json.loads(words)
        (tmp_path / "ds.json").write_text(words)
        given = ["--deepspeed_config", str(tmp_path / "ds.json"), "--zero-stage", "3"]
    with pytest.raises(FlagError, match=re.escape(message)):
        resolve(parse_flags([*SHAPE, *given]), RANKS, RANKS)


def test_the_page_has_flags_and_keys() -> None:
    assert len(CASES) > 40 and sum(words.startswith("{") for words, _ in CASES) > 10
