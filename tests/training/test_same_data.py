"""Ranks with another tokenizer or other corpora."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.rank_threads import on_ranks
from harness.small_state import Gathering
from harness.tiny_corpus import write_corpus

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.parallel.initialize import StartupError
from megatron_zpp.training.same_data import check_same_data
from megatron_zpp.training.setup import Vocabulary

Data = tuple[Vocabulary, list[IndexedDataset]]
SMALL = Vocabulary(100, 104, 99)


def refusals(*of_ranks: Data) -> list[str]:
    """What each rank raises; empty for a rank that goes on."""
    gathering = Gathering(len(of_ranks))

    def refusal(rank: int) -> str:
        try:
            check_same_data(*of_ranks[rank], gathering.of(rank))
        except StartupError as error:
            return str(error)
        return ""

    return on_ranks(len(of_ranks), refusal)


def test_copies_of_the_same_corpora_under_other_names_are_the_same_data(tmp_path: Path) -> None:
    one, other = (IndexedDataset(write_corpus(tmp_path, [[1] * 20, [2]], name=name)) for name in ("one", "other"))
    assert refusals((SMALL, [one]), (SMALL, [other]), (SMALL, [one])) == ["", "", ""]


@pytest.mark.parametrize("other", [Vocabulary(101, 104, 99), Vocabulary(100, 104, 98)])
def test_another_tokenizer_is_refused_on_every_rank(other: Vocabulary) -> None:
    (words,) = set(refusals((SMALL, []), (SMALL, []), (other, [])))
    assert "a tokenizer with 100 ids, of which 99 ends a document on rank 0" in words
    assert f"a tokenizer with {other.size} ids, of which {other.eod} ends a document on rank 2" in words


def test_a_corpus_that_one_rank_names_twice_is_refused(tmp_path: Path) -> None:
    one = IndexedDataset(write_corpus(tmp_path, [[1] * 20]))
    (words,) = set(refusals((SMALL, [one, one]), (SMALL, [one])))
    assert f"{one.prefix} with 1 document and 20 tokens on rank 0, and no corpus with 0 tokens on rank 1" in words
