from __future__ import annotations

from pathlib import Path

import pytest

from megatron_zpp.checkpoint.manifest import StoredFile
from megatron_zpp.checkpoint.unfinished import read_record, write_record


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
    write_record(unfinished, 1, file, [])
    assert read_record(sealed, 1) == (file, [])
