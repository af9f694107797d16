"""Every row of the table for users of Megatron gets the answer that it promises."""

from __future__ import annotations

import re
import shlex

import pytest
from harness.places import ROOT

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve

PAGE = (ROOT / "docs" / "coming_from_megatron.md").read_text(encoding="utf-8")
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1 --global-batch-size 320".split()
RANKS = 4
ROWS = re.findall(r"^\| (`--.*?) \| (works|a line|refused) \|", PAGE, re.MULTILINE)
CELLS = [(words, answer) for cell, answer in ROWS for words in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize(("words", "answer"), CELLS)
def test_a_flag_of_the_table_gets_its_answer(words: str, answer: str) -> None:
    given = [*SHAPE, *shlex.split(words)]
    if "tokenizer-type" in words:
        given += ["--tokenizer-model", "m", "--mock-data"]
    if answer == "refused":
        with pytest.raises(FlagError, match=f"^{shlex.split(words)[0]} .*is not (accepted|available)"):
            resolve(parse_flags(given), RANKS, RANKS)
        return
    config = parse_flags(given)
    assert bool(config.notices) == (answer == "a line")
    resolve(config, RANKS, RANKS)


def test_the_table_has_rows_of_every_kind() -> None:
    assert {answer for _, answer in CELLS} == {"works", "a line", "refused"} and len(CELLS) > 25
