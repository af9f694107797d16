"""Runs whose nodes keep checkpoints on disks of their own, which are folders here; in test_own_disks they are mounts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from harness.parts import all_in
from harness.rank_pool import RankPool
from harness.tiny_runs import TINY, entry_in, losses, records_of
from harness.world_of_gpus import world_without_gloo

SAVED_AT, END = 3, 6
SMALL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3"
COMMON = f"{SMALL} --train-iters {END} --global-batch-size 12 --micro-batch-size 1 --zero-stage 3 --node-local-checkpoints"


def entry_on_a_node(folder: str, disks: list[str], flags: str, log: str) -> tuple[int, str]:
    """The exit code of the entry and what it printed, where `disk` in the flags is a folder of the rank's node."""
    node = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return entry_in(folder, [*TINY, *flags.replace("disk", disks[node]).split()], log)


def run(ranks: RankPool, folder: Path, disks: list[Path], ranks_per_node: int, flags: str, log: str) -> tuple[list[int], list[str]]:
    names = [str(disk) for disk in disks]
    found = ranks.run(len(disks), ranks_per_node, entry_on_a_node, str(folder), names, f"{COMMON} {flags}", str(folder / log))
    return [code for code, _ in found], [text for _, text in found]


@pytest.fixture(scope="module")
def unbroken(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[tuple[float, float]]]:
    """The disks of two nodes after a run of two ranks on each, and its losses."""
    folder = tmp_path_factory.mktemp("unbroken")
    disks = [folder / "disk_0", folder / "disk_1"]
    codes, _ = run(ranks, folder, disks, 2, f"--save disk --load disk --save-interval {SAVED_AT} --async-save", "run.jsonl")
    assert codes == [0] * 4
    return disks, losses(records_of(folder / "run.jsonl"))


@pytest.mark.parametrize(
    ("order", "ranks_per_node"), [("01", 2), ("10", 2), pytest.param("01-", 2, marks=pytest.mark.long), ("*", 2)], ids=str
)
def test_the_next_losses_are_those_of_the_unbroken_run(
    ranks: RankPool, tmp_path: Path, unbroken: tuple[list[Path], list[tuple[float, float]]], order: str, ranks_per_node: int
) -> None:
    """Bit for bit in the same world, whichever node has which disk, else within the rounding of sums in another order."""
    saved, expected = unbroken
    all_in(saved, tmp_path / "both")
    places = {"0": saved[0], "1": saved[1], "-": tmp_path / "empty", "*": tmp_path / "both"}
    disks = [places[letter] for letter in order]
    codes, texts = run(ranks, tmp_path, disks, ranks_per_node, f"--load disk --ckpt-step {SAVED_AT}", "run.jsonl")
    assert codes == [0] * len(codes), texts[0]
    found = losses(records_of(tmp_path / "run.jsonl"))
    assert ("come from the disks of other nodes" in texts[0]) == (order not in ("01", "*"))
    if len(disks) == 2:
        assert found == expected[SAVED_AT:]
    else:
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected[SAVED_AT:]], rel=1e-5)


def test_a_lost_disk_ends_the_run_at_its_start_and_an_older_iteration_can_be_loaded(
    ranks: RankPool, tmp_path: Path, unbroken: tuple[list[Path], list[tuple[float, float]]]
) -> None:
    saved, expected = unbroken
    disks = [shutil.copytree(disk, tmp_path / disk.name) for disk in saved]
    shutil.rmtree(disks[1] / "iter_0000006")
    flags = "--load disk --save disk"
    codes, texts = run(ranks, tmp_path, disks, 2, flags, "run.jsonl")
    assert codes == [2] * 4
    assert "iter_0000006 is not whole: no node has rank_00002.safetensors, rank_00003.safetensors" in texts[0]
    assert "or load iteration 3, which is whole, with --ckpt-step or --load-last-good-checkpoint" in texts[0]
    codes, texts = run(ranks, tmp_path, disks, 2, f"{flags} --load-last-good-checkpoint", "run.jsonl")
    assert codes == [0] * 4 and "WARNING: passed over, because" in texts[0]
    assert losses(records_of(tmp_path / "run.jsonl")) == expected[SAVED_AT:]
    assert all((disk / "iter_0000006" / "complete.json").exists() for disk in disks)


def test_with_copies_a_lost_disk_costs_nothing(
    ranks: RankPool, tmp_path: Path, unbroken: tuple[list[Path], list[tuple[float, float]]]
) -> None:
    """Nor does a copy change a bit of the run that makes it, or of the next one with an empty disk."""
    _, expected = unbroken
    disks = [tmp_path / "disk_0", tmp_path / "disk_1"]
    flags = f"--save disk --load disk --save-copies 2 --save-interval {SAVED_AT} --async-save"
    codes, texts = run(ranks, tmp_path, disks, 2, f"{flags} --exit-interval {SAVED_AT}", "run.jsonl")
    assert codes == [0] * 4
    written = [{path.name: path.read_bytes() for path in disk.glob("iter_0000003/*.safetensors")} for disk in disks]
    assert written[0] == written[1] and len(written[0]) == 4
    gib = sum(len(data) for data in written[0].values()) / 2 / 2**30
    assert f"copies on the disks of other nodes: {gib:.3f} GB came into node 0" in texts[0]
    shutil.rmtree(disks[1])
    codes, texts = run(ranks, tmp_path, disks, 2, flags, "run.jsonl")
    assert codes == [0] * 4, texts[0]
    assert losses(records_of(tmp_path / "run.jsonl")) == expected
    assert {path.name for path in disks[1].glob("iter_0000006/*")} == {*written[0], "manifest.json", "complete.json"}


def test_one_folder_of_two_nodes_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    codes, texts = run(ranks, tmp_path, [tmp_path / "disk_0"] * 2, 1, "--save disk", "run.jsonl")
    assert codes == [2, 2]
    assert "is one folder on this node and on that of process" in texts[0] and "leave out --node-local-checkpoints" in texts[0]


def entry_over_a_world_without_gloo(folder: str, disks: list[str], flags: str, log: str) -> tuple[int, str]:
    """The same, as in a run on GPUs; lanes and numbers have gloo instead of NCCL."""
    with world_without_gloo():
        return entry_on_a_node(folder, disks, flags, log)


def test_no_message_of_the_host_needs_a_gloo_group_of_all_ranks(
    ranks: RankPool, tmp_path: Path, unbroken: tuple[list[Path], list[tuple[float, float]]]
) -> None:
    """Nor does a run that goes on from disks that have changed places, and saves copies."""
    saved, expected = unbroken
    disks = [str(shutil.copytree(disk, tmp_path / disk.name)) for disk in reversed(saved)]
    flags = f"{COMMON} --load disk --ckpt-step {SAVED_AT} --save disk.new --save-copies 2 --async-save"
    found = ranks.run(2, 2, entry_over_a_world_without_gloo, str(tmp_path), disks, flags, str(tmp_path / "run.jsonl"))
    assert [code for code, _ in found] == [0] * 4, found[0][1]
    assert "come from the disks of other nodes" in found[0][1]
    assert losses(records_of(tmp_path / "run.jsonl")) == expected[SAVED_AT:]
