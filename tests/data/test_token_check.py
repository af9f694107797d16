import os
from pathlib import Path

import pytest
from harness.tiny_corpus import write_corpus

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.token_check import check_token_ids_once


def test_a_corpus_is_read_once_and_again_after_it_changed_or_for_a_smaller_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr("megatron_zpp.data.token_check.check_token_ids", lambda dataset, vocab_size: read.append(vocab_size))
    prefix = write_corpus(tmp_path, [[1, 2, 9]])
    for vocab_size in (10, 10, 12, 8):
        check_token_ids_once(IndexedDataset(prefix), vocab_size, tmp_path / "cache")
    assert read == [10, 8]
    os.utime(f"{prefix}.bin", ns=(1, 1))
    check_token_ids_once(IndexedDataset(prefix), 8, tmp_path / "cache")
    assert read == [10, 8, 8]


def test_a_bad_id_is_refused_every_time_and_an_unwritable_folder_changes_nothing(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path, [[1, 2, 9]]))
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "cache", tmp_path / "cache", tmp_path / "file"):
        with pytest.raises(ValueError, match="token id 9"):
            check_token_ids_once(dataset, 9, folder)
        check_token_ids_once(dataset, 10, folder)
