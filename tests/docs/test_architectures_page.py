"""The flags of published models in docs/architectures.md give the numbers of parameters in their headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.data.tokenizers.tokenizer import padded_vocab_size
from megatron_zpp.model.flops import parameter_count

PAGE = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
MODEL = re.compile(r"^### ([^\n]+): ([\d,]+) parameters\n.*?^```flags\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODELS = {name: (int(count.replace(",", "")), flags.split()) for name, count, flags in MODEL.findall(PAGE)}
RUN = "--mock-data --tokenizer-type NullTokenizer --train-iters 1 --lr 1"


@pytest.mark.parametrize("name", list(MODELS))
def test_a_published_model_has_its_number_of_parameters(name: str) -> None:
    expected, flags = MODELS[name]
    config = resolve(parse_flags([*flags, *RUN.split()]), 1, None)
    assert not any("has no effect" in notice for notice in config.notices)
    vocabulary = config.data.vocab_size
    assert vocabulary is not None
    assert parameter_count(config.model, padded_vocab_size(vocabulary, config.model.make_vocab_size_divisible_by)) == expected


def test_the_page_shows_every_kind() -> None:
    assert len(MODELS) == PAGE.count("### ") == 9
