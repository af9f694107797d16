"""Errors of small files name the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.durable import write_durably
from megatron_zpp.monitor.output_file import sync_folder


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
