"""The manifest and its marker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.small_state import Ranks, state_at

from megatron_zpp.checkpoint.manifest import (
    MANIFEST_FILE,
    MARKER_FILE,
    CheckpointError,
    DamagedCheckpointError,
    is_complete,
    marker_json,
    read_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Ranks(tmp_path, state_at(7)).save(7)
    return tmp_path / "iter_0000007"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest and adapts the marker, as an attacker would do."""
    members = json.loads((folder / MANIFEST_FILE).read_text())
    change(members)
    text = json.dumps(members)
    (folder / MANIFEST_FILE).write_text(text)
    (folder / MARKER_FILE).write_text(marker_json(text))


def test_a_manifest_reads_back_as_it_was_written(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest.to_json() == (folder / MANIFEST_FILE).read_text()
    assert manifest.iteration == 7 and len(manifest.files) == 2


@pytest.mark.parametrize("file", [MANIFEST_FILE, MARKER_FILE])
def test_every_flipped_byte_of_manifest_or_marker_is_found(folder: Path, file: str) -> None:
    whole = (folder / file).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 50)):
        (folder / file).write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpointError, match=str(folder)):
            read_manifest(folder)


@pytest.mark.parametrize("file", [MANIFEST_FILE, MARKER_FILE])
def test_without_manifest_or_marker_a_folder_is_no_checkpoint(folder: Path, file: str) -> None:
    (folder / file).unlink()
    assert not is_complete(folder)
    with pytest.raises(DamagedCheckpointError, match=f"{file} cannot be read .*incomplete; choose an older one with --ckpt-step"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda members: members["files"][0].update(name="../../elsewhere"), "is not a file name"),
        (lambda members: members["files"][0].update(name=".."), "is not a file name"),
        (lambda members: members["files"][0]["checksums"].pop(), "checksums"),
        (lambda members: members["pieces"][0].update(stop=10**9), "has a piece from"),
        (lambda members: members["pieces"][0].update(file="other"), "other"),
        (lambda members: members["pieces"][0].update(parameter="other"), "other"),
        (lambda members: members["pieces"][0].update(offsets={"weight": 10**9}), "at byte 1000000000"),
        (lambda members: members["pieces"][0].update(offsets={"other": 800}), "has other at byte"),
        (lambda members: members["states"].update(weight="BF16"), "elements of type BF16"),
        (lambda members: members.update(chunk_bytes=0), "chunks of 0 bytes"),
        (lambda members: members.pop("shapes"), "shapes"),
        (lambda members: members.update(unknown=1), "unknown"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_damaged(folder: Path, change: Callable[[dict[str, Any]], object], finding: str) -> None:
    rewrite(folder, change)
    with pytest.raises(DamagedCheckpointError, match="is damaged") as error:
        read_manifest(folder)
    assert finding in str(error.value)


@pytest.mark.parametrize(("member", "value"), [("format", "other"), ("format_version", 1)])
def test_another_format_is_named_and_not_called_damaged(folder: Path, member: str, value: object) -> None:
    rewrite(folder, lambda members: members.update({member: value}))
    with pytest.raises(CheckpointError) as error:
        read_manifest(folder)
    assert not isinstance(error.value, DamagedCheckpointError)
    assert str(value) in str(error.value) or "not a manifest" in str(error.value)
