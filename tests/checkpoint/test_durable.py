"""What is saved is on the disk before it has its name, and before anything relies on it. Errors of small files name the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from harness.disk_events import disk_events
from harness.small_state import Ranks, state_at

from megatron_zpp.checkpoint.durable import write_durably
from megatron_zpp.checkpoint.export import new_folder, write_json, write_tensors
from megatron_zpp.checkpoint.shard_file import TensorEntry
from megatron_zpp.system.output_file import sync_folder
from megatron_zpp.system.owner import own_token


@pytest.mark.parametrize("number, kind", [(errno.EIO, OSError), (errno.ENOSPC, OSError), (errno.EACCES, PermissionError)])
def test_an_error_of_fsync_names_file_and_folder_and_keeps_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[OSError]
) -> None:
    def failing_fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing_fsync)
    with pytest.raises(kind, match=f"'{tmp_path / 'latest'}'"):
        write_durably(tmp_path / "latest", "100")
    with pytest.raises(kind, match=f"'{tmp_path}'"):
        sync_folder(tmp_path)


def test_what_is_saved_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = disk_events(monkeypatch)
    Ranks(tmp_path / "saved", state_at(1), 1).save(1)
    events.clear()
    Ranks(tmp_path / "saved", state_at(2), 1).save(1)
    token = own_token()
    assert events == [
        "sync saved",  # it has the unfinished folder now
        "sync rank_00000.safetensors",
        "sync rank_00000.json.partial",
        f"sync iter_0000001.tmp-{token}",
        "rename rank_00000.json",  # which tells rank 0 that these are on the disk
        "sync manifest.json",
        "sync complete.json",
        f"sync iter_0000001.tmp-{token}",
        f"rename iter_0000001.replaced-{token}",
        "sync saved",
        "rename iter_0000001",
        "sync saved",
        f"sync latest_checkpointed_iteration.txt.new-{token}",
        "rename latest_checkpointed_iteration.txt",
        "sync saved",
    ]


def test_exported_files_are_on_the_disk_before_their_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = disk_events(monkeypatch)
    with new_folder(tmp_path / "exported") as folder:
        write_tensors(folder, [TensorEntry("t", "F32", (3,))], lambda entry: torch.zeros(3), 100)
        write_json(folder / "config.json", {})
    assert events == [
        "sync model.safetensors",
        "sync config.json",
        f"sync exported.tmp-{own_token()}",
        "rename exported",
        f"sync {tmp_path.name}",
    ]
