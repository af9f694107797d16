"""Checkpoints of manifest version 2, which knew neither columns nor element types, are read as they were written.

data/version_2 was saved by two ranks of a program that wrote version 2. Element e of state s of parameter p is
(e + 100 p + 1000 s) / 8 - 3.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.folders import find_checkpoint
from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, MARKER_FILE, CheckpointError, DamagedCheckpointError, marker_json, read_manifest
from megatron_zpp.checkpoint.reader import CheckpointReader

DIRECTORY = Path(__file__).parent / "data" / "version_2"
FOLDER = DIRECTORY / "iter_0000007"
SHAPES = {"embedding.word.weight": (6, 4), "blocks.0.mlp.up.bias": (7,), "final.norm.weight": (4,)}
STATES = ("weight", "exp_avg", "exp_avg_sq")


def test_every_value_and_every_number_is_read() -> None:
    assert json.loads((FOLDER / MANIFEST_FILE).read_text())["format_version"] == 2
    assert find_checkpoint(DIRECTORY, None) == FOLDER
    with CheckpointReader(FOLDER) as reader:
        assert list(reader.verify()) == []
        for place, (name, shape) in enumerate(SHAPES.items()):
            for index, state in enumerate(STATES):
                numel = torch.Size(shape).numel()
                expected = (torch.arange(numel, dtype=torch.float32) + 100 * place + 1000 * index) / 8 - 3
                assert torch.equal(reader.read(name, state, 0, numel), expected)
            assert reader.weight(name).shape == shape
        manifest = reader.manifest
    assert (manifest.iteration, manifest.consumed_samples, manifest.shapes) == (7, 56, SHAPES)
    assert manifest.run == {"scheduled_samples": 56, "optimizer_steps": 7, "loss_scaler": {"scale": 1.0}}
    assert manifest.topology == {"world_size": 2, "ranks_per_node": 2, "partition_ranks": 2}
    assert all(piece.columns is None for piece in manifest.pieces)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy with another manifest and its marker."""
    shutil.copytree(FOLDER, folder)
    members = json.loads((folder / MANIFEST_FILE).read_text())
    change(members)
    text = json.dumps(members)
    (folder / MANIFEST_FILE).write_text(text)
    (folder / MARKER_FILE).write_text(marker_json(text))
    return folder


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda members: members["states"].update(exp_avg="BF16"), "has the state exp_avg with elements of type BF16"),
        (lambda members: members["pieces"][0].update(columns=[0, 4]), "has a piece of columns 0 to 4 of embedding.word.weight"),
    ],
)
def test_what_version_2_did_not_know_is_damage_in_it(tmp_path: Path, change: Callable[[dict[str, Any]], object], finding: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=finding):
        read_manifest(rewritten(tmp_path / "iter_0000007", change))


def test_versions_that_this_program_does_not_know_are_named_with_those_that_it_reads(tmp_path: Path) -> None:
    folder = rewritten(tmp_path / "iter_0000007", lambda members: members.update(format_version=4))
    with pytest.raises(CheckpointError, match="has format version 4, this program reads 2 and 3; use the program that wrote it"):
        read_manifest(folder)
