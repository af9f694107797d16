"""Every state has an element type of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import consolidate_checkpoint
import inspect_checkpoint
import pytest
import torch
from harness.divided_state import SHAPES, World, pieces_of_rank, save, whole_state
from harness.run_state import run_state
from harness.small_state import Gathering
from safetensors import safe_open

from megatron_zpp.checkpoint.folders import move_latest
from megatron_zpp.checkpoint.manifest import Manifest
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions, Share
from megatron_zpp.checkpoint.unfinished import write_pieces
from megatron_zpp.zero.pieces import Piece

STATES = {"weight": "F32", "exp_avg": "BF16", "exp_avg_sq": "F16"}


@pytest.mark.parametrize("in_background", [False, True])
def test_a_state_in_16_bits_is_saved_and_read_bit_for_bit(tmp_path: Path, in_background: bool) -> None:
    """Odd numbers of 16-bit elements do not move 32-bit elements to odd places: those come first in a file."""
    whole = whole_state(STATES)
    share = Share(0, 1, list(pieces_of_rank(whole, World(1, 1), 0, only_counted=True)))
    saver = CheckpointSaver(tmp_path, share, SaveOptions(in_background=in_background), Gathering(1).of(0))
    saver.save(Manifest(3, 24, SHAPES, STATES, run_state(24), {}, {}, {}, chunk_bytes=64))
    saver.finish()
    assert share.nbytes == sum(values.nbytes for values in whole.values())
    with CheckpointReader(tmp_path / "iter_0000003") as reader:
        assert list(reader.verify()) == [] and reader.manifest.states == STATES
        for (name, state), values in whole.items():
            found = reader.read(name, state, 0, values.numel())
            assert found.dtype == values.dtype and torch.equal(found, values.view(-1))
    with safe_open(tmp_path / "iter_0000003" / "rank_00000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("norm.exp_avg.0"), whole["norm", "exp_avg"])


def test_values_are_cast_to_the_dtype_of_what_they_fill(tmp_path: Path) -> None:
    whole = whole_state(STATES)
    save(tmp_path / "iter_0000001", whole, STATES, World(2, 2))
    with CheckpointReader(tmp_path / "iter_0000001") as reader:
        found = [
            Piece("down", "exp_avg", 0, 240, torch.zeros(240)),
            Piece("down", "weight", 0, 240, torch.zeros(240, dtype=torch.bfloat16)),
        ]
        reader.fill(found)
    assert torch.equal(found[0].values, whole["down", "exp_avg"].float().view(-1))
    assert torch.equal(found[1].values, whole["down", "weight"].bfloat16().view(-1))


def test_values_are_widened_to_what_the_manifest_says_and_never_rounded(tmp_path: Path) -> None:
    values = torch.tensor([1.5, 2.0**-120])
    write_pieces(tmp_path / "f", [Piece("norm", "weight", 0, 2, values.bfloat16())], {"weight": "F32"}, 64)
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert torch.equal(file.get_tensor("norm.weight.0"), values)
    for element_type, dtype in (("BF16", "float32"), ("F16", "bfloat16")):
        with pytest.raises(RuntimeError, match=f"norm \\(weight\\) is torch.{dtype}, its manifest says {element_type}"):
            write_pieces(tmp_path / "g", [Piece("norm", "weight", 0, 2, values.to(getattr(torch, dtype)))], {"weight": element_type}, 64)


@pytest.mark.parametrize("world", [World(1, 2), World(4, 1)], ids=str)
def test_the_tools_read_states_of_any_element_type_and_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], world: World
) -> None:
    states = {"weight": "BF16", "exp_avg": "BF16"}
    whole = whole_state(states)
    save(tmp_path / "iter_0000001", whole, states, world)
    move_latest(tmp_path, "1")
    monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", "--load", str(tmp_path), "--verify", "--parameters"])
    inspect_checkpoint.main()
    printed = capsys.readouterr().out
    assert "states: weight BF16, exp_avg BF16" in printed and "are as they were written" in printed
    if world.tensor_ranks == 1:
        assert "down [3, 80] in 2 pieces\n" in printed
    else:
        assert "down [3, 80] in 4 pieces of 4 ranges of columns\n" in printed
    monkeypatch.setattr(sys, "argv", ["consolidate_checkpoint.py", "--load", str(tmp_path), "--output", str(tmp_path / "out")])
    consolidate_checkpoint.main()
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        for name in SHAPES:
            assert torch.equal(file.get_tensor(name), whole[name, "weight"].float()), name
