"""What the tool prints about good, damaged and unfinished checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import inspect_checkpoint
import pytest
from harness.small_state import Ranks, state_at

from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, MARKER_FILE, marker_json


def output_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and output of the tool, run in this process."""
    monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", *map(str, arguments)])
    code = 0
    try:
        inspect_checkpoint.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for iteration in (1, 2):
        Ranks(tmp_path, state_at(iteration)).save(iteration)
    return tmp_path


def test_it_tells_what_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    (directory / "iter_0000003.tmp-ab12").mkdir()
    (directory / "iter_0000004").mkdir()
    code, text = output_of(monkeypatch, capsys, "--load", directory, "--parameters", "--verify")
    assert code == 0
    stored = sum(file.stat().st_size for file in (directory / "iter_0000002").glob("*.safetensors"))
    for words in (
        "checkpoints of iterations 1, 2",
        "incomplete or damaged: 4",
        "latest_checkpointed_iteration.txt: 2",
        "not finished (tmp): iter_0000003.tmp-ab12",
        "iter_0000002: iteration 2, 16 samples consumed",
        "3020 parameters in 3 tensors; states: weight F32, exp_avg F32",
        "2 files, ",
        "embedding.weight [60, 20] in 2 pieces",
        f"verified: all {stored} bytes are as they were written",
    ):
        assert words in text, words


def test_parts_of_several_nodes_are_one_checkpoint_and_one_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nodes = [tmp_path / "node 0", tmp_path / "node 1"]
    Ranks(nodes, state_at(1)).save(1)
    code, text = output_of(monkeypatch, capsys, "--load", *nodes, "--verify")
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert code == 0 and f"verified: all {stored} bytes are as they were written" in text and "disks 2" in text
    code, text = output_of(monkeypatch, capsys, "--load", nodes[1])
    assert code == 2 and "is a part of a checkpoint on the disks of 2 nodes and lacks rank_00000.safetensors" in text
    assert "(--load DIR DIR), or copy them into one folder" in text
    Ranks(tmp_path / "other", state_at(1)).save(1)
    for other, has in (("other", "one of another save"), ("missing", "no checkpoint of that name")):
        code, text = output_of(monkeypatch, capsys, "--load", nodes[0], tmp_path / other)
        assert code == 2 and f"{tmp_path / other} has {has}" in text


def test_damage_is_told_with_the_file_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], directory: Path
) -> None:
    shard = directory / "iter_0000001" / "rank_00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    code, text = output_of(monkeypatch, capsys, "--load", directory, "--ckpt-step", 1, "--verify")
    assert code == 1 and f"DAMAGED: {shard} is damaged: bytes" in text
    assert output_of(monkeypatch, capsys, "--load", directory, "--verify")[0] == 0


def test_a_folder_without_checkpoints_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, text = output_of(monkeypatch, capsys, "--load", tmp_path / "none")
    assert code == 2 and "holds no checkpoint" in text


def test_pieces_that_are_missing_are_damage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    folder = directory / "iter_0000002"
    members = json.loads((folder / MANIFEST_FILE).read_text())
    lost = members["pieces"].pop(0)
    text = json.dumps(members)
    (folder / MANIFEST_FILE).write_text(text)
    (folder / MARKER_FILE).write_text(marker_json(text))
    code, printed = output_of(monkeypatch, capsys, "--load", directory, "--verify")
    assert code == 1 and f"DAMAGED: {folder} is incomplete" in printed
    assert f"elements {lost['start']} to {lost['stop']} of {lost['parameter']} (weight) are in none of its files" in printed
