"""Damaged and hostile files are found and named, and never executed."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.small_state import CHUNK_BYTES, Ranks, State, check_holds, manifest_at, state_at

from megatron_zpp.checkpoint.folders import LATEST_FILE, find_checkpoint
from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, MARKER_FILE, CheckpointError, DamagedCheckpointError, marker_json
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.zero.pieces import Piece

FLIPS = 200


def load_all(folder: Path) -> State:
    """Every state of every parameter, as a rank in a world of one loads them."""
    values = {key: expected.clone().zero_() for key, expected in state_at(1).items()}
    with CheckpointReader(folder) as reader:
        reader.fill(Piece(name, kind, 0, tensor.numel(), tensor) for (name, kind), tensor in values.items())
    return values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Ranks(tmp_path, state_at(1), world_size=3).save(1)
    return tmp_path / "iter_0000001"


def test_a_byte_flipped_anywhere_in_a_shard_is_found_when_it_is_loaded_and_named(folder: Path) -> None:
    places = random.Random(5)
    for _ in range(FLIPS):
        path = folder / f"rank_{places.randrange(3):05d}.safetensors"
        whole = path.read_bytes()
        data = bytearray(whole)
        place = places.randrange(len(data))
        data[place] ^= places.randrange(1, 256)
        path.write_bytes(data)
        first = place // CHUNK_BYTES * CHUNK_BYTES
        with pytest.raises(DamagedCheckpointError, match=f"{path} is damaged: bytes {first} to .* give --load-last-good-checkpoint"):
            load_all(folder)
        with CheckpointReader(folder) as reader:
            assert [path.name in finding for finding in reader.verify()] == [True]
        path.write_bytes(whole)
    check_holds(folder, 1)


def test_a_shard_that_is_missing_or_cut_short_is_named(folder: Path) -> None:
    path = folder / "rank_00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(DamagedCheckpointError, match=f"{path} has {len(data) - 1} bytes, its manifest says {len(data)}"):
        load_all(folder)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{path} cannot be read"):
        load_all(folder)


def rewrite_pieces(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Changes the pieces in the manifest and adapts the marker, as an attacker would do."""
    members = json.loads((folder / MANIFEST_FILE).read_text())
    change(members["pieces"])
    text = json.dumps(members)
    (folder / MANIFEST_FILE).write_text(text)
    (folder / MARKER_FILE).write_text(marker_json(text))


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda pieces: pieces.pop(0), "in none of its files"), (lambda pieces: pieces.append(pieces[0]), "in its files twice")],
)
def test_pieces_that_overlap_or_leave_gaps_are_refused_at_load_and_found_by_verify(
    folder: Path, change: Callable[[list[dict[str, Any]]], object], words: str
) -> None:
    rewrite_pieces(folder, change)
    with pytest.raises(DamagedCheckpointError, match=f"{folder} is incomplete or contradicts itself: elements .* of .*{words}; choose"):
        load_all(folder)
    with CheckpointReader(folder) as reader:
        findings = list(reader.verify())
    assert findings and all(words in finding for finding in findings)


def test_chunks_larger_than_memory_take_no_more_of_it_than_their_file(tmp_path: Path) -> None:
    Ranks(tmp_path, state_at(1)).on_each(lambda saver: saver.save(manifest_at(1, chunk_bytes=1 << 60)))
    check_holds(tmp_path / "iter_0000001", 1)


@pytest.mark.parametrize("name", ["rank_00000.safetensors", f"../{LATEST_FILE}"])
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match="cannot be read .it is a pipe, not a regular file"):
        load_all(find_checkpoint(folder.parent, None) or folder)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["manifest.json", "complete.json", "rank_00000.safetensors", f"../{LATEST_FILE}"])
def test_a_pickle_under_any_name_of_ours_is_refused_and_not_executed(folder: Path, name: str) -> None:
    sprung = folder.parent / "sprung"
    trap = pickle.dumps(Trap(sprung))
    (folder / name).write_bytes(trap)
    with pytest.raises(CheckpointError, match=Path(name).name):
        load_all(find_checkpoint(folder.parent, None) or folder)
    assert not sprung.exists()
    pickle.loads(trap)
    assert sprung.exists()  # the trap itself works


def test_nothing_in_the_checkpoint_room_or_the_tools_can_unpickle() -> None:
    root = Path(__file__).parents[2]
    for path in (*(root / "megatron_zpp" / "checkpoint").glob("*.py"), *(root / "tools").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert "torch.load(" not in text and "import pickle" not in text and "allow_pickle=True" not in text, path
