from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.manifest import CheckpointError, StoredFile
from megatron_zpp.checkpoint.unfinished import Record, read_record, write_record


def test_a_rank_that_has_said_that_it_is_done_needs_the_folder_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished, sealed = tmp_path / "iter_0000001.tmp", tmp_path / "iter_0000001"
    unfinished.mkdir()
    rename = Path.rename

    def rename_and_seal(path: Path, target: Path) -> Path:
        """Rank 0 has waited for this record, and seals the folder at once."""
        renamed = rename(path, target)
        rename(unfinished, sealed)
        return renamed

    monkeypatch.setattr(Path, "rename", rename_and_seal)
    file = StoredFile("rank_00001.safetensors", 8, 8, (1,))
    write_record(unfinished, 1, Record((file,)))
    assert read_record(sealed, 1) == Record((file,))


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        ("[" * 100_000, "is nested more than 64 levels deep"),
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "lacks files"),
        ('{"files": [3], "pieces": []}', "files.0. must be an object, not 3"),
        ('{"files": [{"name": "a", "nbytes": 8, "header_bytes": 8, "checksums": [1]}], "pieces": 3}', "pieces must be a list, not 3"),
        ('{"files": [{"name": "a", "nbytes": -8, "header_bytes": 8, "checksums": [1]}], "pieces": []}', "nbytes must be a whole number"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_by_its_file(tmp_path: Path, content: str, finding: str) -> None:
    (tmp_path / "rank_00001.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"{finding}.*; checkpoints .--save. need a folder of one file system that all ranks share"):
        read_record(tmp_path, 1)


def test_a_pipe_or_a_link_in_the_place_of_a_record_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank_00001.json")
    (tmp_path / "rank_00002.json").symlink_to("/dev/zero")
    for rank, finding in ((1, "it is a pipe, not a regular file"), (2, "it is a symbolic link")):
        with pytest.raises(CheckpointError, match=f"rank_0000{rank}.json cannot be read .{finding}"):
            read_record(tmp_path, rank)
    assert read_record(tmp_path, 3) is None
