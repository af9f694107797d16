import os
from pathlib import Path

import pytest
from harness.tiny_corpus import write_corpus

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.token_check import check_token_ids_once
from megatron_zpp.system.user_error import UserError


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
        with pytest.raises(UserError, match="token id 9"):
            check_token_ids_once(dataset, 9, folder)
        check_token_ids_once(dataset, 10, folder)


@pytest.mark.parametrize("length", [3, 200_000])
def test_a_corpus_put_in_the_place_of_another_with_its_size_and_time_is_read_again(tmp_path: Path, length: int) -> None:
    prefix = write_corpus(tmp_path, [[1] * length])
    check_token_ids_once(IndexedDataset(prefix), 10, tmp_path / "cache")
    status = os.stat(f"{prefix}.bin")
    replacement = tmp_path / "other"
    replacement.mkdir()
    os.replace(f"{write_corpus(replacement, [[11] * length])}.bin", f"{prefix}.bin")
    os.utime(f"{prefix}.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat(f"{prefix}.bin").st_size == status.st_size
    with pytest.raises(UserError, match="token id 11"):
        check_token_ids_once(IndexedDataset(prefix), 10, tmp_path / "cache")


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"vocab_size": NaN}', "pipe"])
def test_a_record_that_cannot_be_used_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    read: list[int] = []
    monkeypatch.setattr("megatron_zpp.data.token_check.check_token_ids", lambda dataset, vocab_size: read.append(vocab_size))
    prefix = write_corpus(tmp_path, [[1, 2, 9]])
    check_token_ids_once(IndexedDataset(prefix), 10, tmp_path / "cache")
    (record,) = (tmp_path / "cache").glob("*token-check.json")
    record.unlink()
    if content == "pipe":
        os.mkfifo(record)
    else:
        record.write_text(content)
    for _ in range(2):
        check_token_ids_once(IndexedDataset(prefix), 10, tmp_path / "cache")
    assert read == [10, 10]


def test_the_path_of_a_corpus_may_have_bytes_that_are_no_text(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"w\xf6")
    folder.mkdir()
    dataset = IndexedDataset(write_corpus(folder, [[1, 2, 9]]))
    check_token_ids_once(dataset, 10, tmp_path / "cache")
    with pytest.raises(UserError, match="token id 9"):
        check_token_ids_once(dataset, 9, tmp_path / "cache")
