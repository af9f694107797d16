"""Files for writing: a link that was planted is not written through, and a pipe is not waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.durable import write_durably
from megatron_zpp.data.build_once import atomic_write
from megatron_zpp.data.preprocess.indexed_writer import open_partial
from megatron_zpp.data.preprocess.journal import Journal, Progress
from megatron_zpp.system.output_file import kept_file, named_output, new_file


def write_new(path: Path) -> None:
    with new_file(path) as file:
        file.write(b"text")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("file", write_new),
        ("out.unfinished.tmp", lambda path: Journal(str(path.parent / "out"), [], {}).save(Progress())),
    ],
)
def test_a_link_or_a_pipe_in_the_place_of_a_new_file_is_replaced(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / name).symlink_to(tmp_path / "victim")
    write(tmp_path / name)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    write(tmp_path / name)
    assert (tmp_path / "victim").read_text() == "kept"
    assert not (tmp_path / name).is_fifo()


def test_a_durable_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "file", "text")
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_file_that_is_kept_is_neither_emptied_nor_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    os.close(kept_file(tmp_path / "victim"))
    assert (tmp_path / "victim").read_text() == "kept"
    (tmp_path / "link.partial").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe.partial")
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_partial(str(tmp_path / "link"), 0)
    with pytest.raises(OSError, match="it is not a regular file"):
        open_partial(str(tmp_path / "pipe"), 0)
    assert not (tmp_path / "new").exists()


def test_a_link_of_a_temporary_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uuid.UUID.hex", "token")
    (tmp_path / "file.token.tmp").symlink_to(tmp_path / "new")
    with pytest.raises(FileExistsError), atomic_write(tmp_path / "file"):
        pass
    assert not (tmp_path / "new").exists()


def test_a_named_output_is_made_appended_to_and_may_be_the_null_device(tmp_path: Path) -> None:
    for text in (b"a", b"b"):
        descriptor = named_output(tmp_path / "file")
        os.write(descriptor, text)
        os.close(descriptor)
    assert (tmp_path / "file").read_text() == "ab"
    os.close(named_output(Path("/dev/null")))
    with pytest.raises(OSError, match="it is not a regular file"):
        named_output(Path("/dev/zero"))
