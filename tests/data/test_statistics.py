import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from harness.tiny_corpus import write_corpus
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data import statistics
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.statistics import count_tokens, unigram_cross_entropy
from megatron_zpp.system.user_error import UserError

DOCUMENTS = [[1, 2, 2], [], [3, 1], [4, 4, 4, 0], [2]]


@pytest.mark.parametrize("documents", [range(5), range(1, 4), range(3, 4), range(1, 2), range(5, 5)])
def test_counts_are_those_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: range) -> None:
    monkeypatch.setattr(statistics, "TOKEN_CHUNK_NUMEL", 2)
    expected = Counter(token for document in documents for token in DOCUMENTS[document])
    counts = count_tokens(IndexedDataset(write_corpus(tmp_path, DOCUMENTS)), documents, 6)
    assert counts.tolist() == [expected[token] for token in range(6)]


@given(data=st.data(), vocab_size=st.integers(1, 8))
def test_cross_entropy_is_the_mean_surprise_of_the_validation_tokens(data: st.DataObject, vocab_size: int) -> None:
    tokens = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=30)
    train, valid = data.draw(tokens), data.draw(tokens)
    surprises = [-math.log((train.count(token) + 1) / (len(train) + vocab_size)) for token in valid]
    found = unigram_cross_entropy(np.bincount(train, minlength=vocab_size), np.bincount(valid, minlength=vocab_size))
    assert found == pytest.approx(sum(surprises) / len(valid), rel=1e-12, abs=1e-12)


def test_no_validation_token_is_refused() -> None:
    with pytest.raises(UserError, match="--split a larger validation share"):
        unigram_cross_entropy(np.ones(4, np.int64), np.zeros(4, np.int64))
