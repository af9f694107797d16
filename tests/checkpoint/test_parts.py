"""Checkpoints in parts, one on the disk of each node: what is saved, found and read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from harness.messages import Messages
from harness.parts import all_in, finders, held_by, loaded
from harness.rank_threads import on_ranks
from harness.small_state import Ranks, check_holds, manifest_at, set_state, state_at

from megatron_zpp.checkpoint import other_disks
from megatron_zpp.checkpoint.folders import LATEST_FILE, complete_iterations
from megatron_zpp.checkpoint.manifest import CheckpointError, DamagedCheckpointError
from megatron_zpp.checkpoint.parts import NotWholeError
from megatron_zpp.checkpoint.saver import SaveOptions

IN_BACKGROUND = SaveOptions(in_background=True)
WORLD_SIZE = 4


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    return [tmp_path / "node 0", tmp_path / "node 1"]


def save(disks: Sequence[Path], *iterations: int, world_size: int = WORLD_SIZE, options: SaveOptions | None = None) -> Ranks:
    state = state_at(0)
    ranks = Ranks(disks, state, world_size, options)
    for iteration in iterations:
        set_state(state, iteration)
        ranks.save(iteration)
    ranks.finish()
    return ranks


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("options", [SaveOptions(), IN_BACKGROUND], ids=["waiting", "in background"])
def test_every_disk_has_the_files_of_its_ranks_and_the_manifest_of_all(disks: list[Path], options: SaveOptions) -> None:
    save(disks, 1, options=options)
    whole = {"manifest.json", "complete.json"}
    for index, disk in enumerate(disks):
        of_ranks = {f"rank_{rank:05d}.safetensors" for rank in (2 * index, 2 * index + 1)}
        assert names(disk) == {"iter_0000001", LATEST_FILE} and names(disk / "iter_0000001") == whole | of_ranks
        assert (disk / LATEST_FILE).read_text() == "1"
    for name in whole:
        assert (disks[0] / "iter_0000001" / name).read_bytes() == (disks[1] / "iter_0000001" / name).read_bytes()


def test_parts_copied_into_one_folder_are_an_ordinary_checkpoint(disks: list[Path], tmp_path: Path) -> None:
    save(disks, 1)
    check_holds(all_in(disks, tmp_path / "together") / "iter_0000001", 1)


def test_the_same_ranks_on_the_same_disks_read_nothing_from_others(disks: list[Path]) -> None:
    save(disks, 1, 2)
    messages = Messages(WORLD_SIZE)
    assert loaded(disks, WORLD_SIZE, messages=messages) == (2, 0)
    assert messages.gathers == 3 and messages.most_sent == 0  # a listing, what is there of the checkpoint, what each rank lacks


@pytest.mark.parametrize(
    ("others", "world_size"),
    [("node 1, node 0", 4), ("node 0, node 1, empty", 3), ("empty, node 1, node 0", 6), ("node 1, node 0", 2), ("both", 1), ("both", 3)],
)
def test_other_orders_and_numbers_of_nodes_read_the_same_bits(disks: list[Path], tmp_path: Path, others: str, world_size: int) -> None:
    save(disks, 3)
    all_in(disks, tmp_path / "both")
    iteration, nbytes = loaded([tmp_path / name for name in others.split(", ")], world_size)
    assert iteration == 3 and (nbytes > 0) == (others != "both")


@pytest.mark.parametrize("limit", [1, 3000, 1 << 26])
def test_what_crosses_is_sent_in_rounds_of_a_bounded_size(disks: list[Path], monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(other_disks, "ROUND_BYTES", limit)
    save(disks, 1)
    messages = Messages(WORLD_SIZE)
    iteration, nbytes = loaded(disks[::-1], WORLD_SIZE, messages=messages)
    files = sum(path.stat().st_size for disk in disks for path in disk.rglob("*.safetensors"))
    assert iteration == 1 and 0.8 * files < nbytes < 1.3 * files  # whole chunks are sent, two of which may hold one piece's end
    range_bytes = 4 * 512  # the least that can be asked for
    assert messages.most_sent <= max(limit, WORLD_SIZE * range_bytes)


def test_keep_last_deletes_on_all_disks(disks: list[Path]) -> None:
    save(disks, 1, 2, 3, options=SaveOptions(keep_last=2))
    assert [complete_iterations(disk) for disk in disks] == [[2, 3], [2, 3]]


def message(disks: Sequence[Path], name: str, world_size: int = WORLD_SIZE) -> str:
    """The error that every rank has where a checkpoint is not whole, and that rank 0 prints, with its remedy."""
    make = finders(disks, world_size)

    def find(rank: int) -> str:
        finder = make(rank)
        with pytest.raises(NotWholeError) as error:
            finder.find(name)
        return f"{error.value}; {finder.remedy(name)}"

    return on_ranks(world_size, find)[0]


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


def take_from_another_run(folder: Path) -> None:
    shutil.rmtree(folder)
    others = folder.parent.parent / "others"
    Ranks([others / "0", others / "1"], state_at(4), WORLD_SIZE).on_each(lambda saver: saver.save(manifest_at(2)))
    shutil.copytree(others / "1" / folder.name, folder)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (remove, r"no node has rank_00002.safetensors, rank_00003.safetensors .*node 1 \(\S+\) has no part of it"),
        (lambda folder: (folder / "rank_00003.safetensors").unlink(), r"no node has rank_00003.safetensors "),
        (damage_manifest, r"no node has rank_00002.*manifest.json has 2 bytes without the checksum in complete.json.*on node 1 \(\S+\)"),
        (take_from_another_run, r"no node has rank_00002.*node 1 \(\S+\) has that of another save; no node has rank_00000"),
    ],
)
def test_a_missing_damaged_or_foreign_part_is_named_with_its_node_and_the_remedy(
    disks: list[Path], harm: Callable[[Path], None], said: str
) -> None:
    save(disks, 1, 2)
    harm(disks[1] / "iter_0000002")
    text = message(disks, "iter_0000002")
    assert re.search(said, text), text
    assert re.search(r"iter_0000002 is not whole.*; bring its missing part back to any node, or load iteration 1, which is whole", text)
    assert loaded(disks, WORLD_SIZE, step=1) == (1, 0)


def test_without_any_whole_checkpoint_the_remedy_names_none(disks: list[Path]) -> None:
    save(disks, 1)
    shutil.rmtree(disks[1])
    assert "bring its missing part back to any node; no older checkpoint is whole" in message(disks, "iter_0000001")


def test_damage_in_a_file_of_another_disk_is_an_error_of_every_rank(disks: list[Path]) -> None:
    save(disks, 1)
    path = disks[0] / "iter_0000001" / "rank_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4")
    make = finders(disks[::-1], WORLD_SIZE)

    def load(rank: int) -> str:
        finder = make(rank)
        with pytest.raises(DamagedCheckpointError) as error:
            held_by(finder, "iter_0000001", rank, WORLD_SIZE)
        return str(error.value)

    text = on_ranks(WORLD_SIZE, load)[0]
    assert "rank_00001.safetensors on the disk of rank" in text and "is damaged: bytes" in text


def candidates(disks: Sequence[Path], step: int | None = None, *, may_be_older: bool = False) -> tuple[list[str], str]:
    make = finders(disks, WORLD_SIZE)
    found = on_ranks(WORLD_SIZE, lambda rank: make(rank).candidates(step, may_be_older=may_be_older))
    assert all(names == found[0][0] for names, _ in found)
    return found[0]


def test_the_highest_iteration_that_a_disk_names_comes_first(disks: list[Path]) -> None:
    assert candidates(disks) == ([], "")
    save(disks, 1, 2, 3)
    (disks[0] / LATEST_FILE).write_text("1")
    assert candidates(disks) == (["iter_0000003"], "")
    (disks[1] / LATEST_FILE).write_text("2")  # 3 is of another branch
    assert candidates(disks, may_be_older=True) == (["iter_0000002", "iter_0000001"], "")
    assert candidates(disks, 3) == (["iter_0000003"], "")
    with pytest.raises(CheckpointError, match=r"--ckpt-step 7: no node has .* node 0 \(\S+\) has 1, 2, 3, node 1 \(\S+\) has 1, 2, 3"):
        candidates(disks, 7)


def test_a_disk_that_names_no_iteration_is_an_error_or_passed_over(disks: list[Path]) -> None:
    save(disks, 1, 2)
    (disks[1] / LATEST_FILE).write_text("two")
    with pytest.raises(
        CheckpointError, match=r"holds 'two' instead of an iteration; choose one with --ckpt-step \(on node 1 \(\S+\)\); node 0"
    ):
        candidates(disks)
    found, notice = candidates(disks, may_be_older=True)
    assert found == ["iter_0000002", "iter_0000001"] and "passed over" in notice
    (disks[1] / LATEST_FILE).write_bytes(b"\xff")
    assert candidates(disks, 2) == (["iter_0000002"], "") and candidates(disks, may_be_older=True)[0] == ["iter_0000002", "iter_0000001"]
    for disk in disks:
        (disk / LATEST_FILE).unlink()
    assert candidates(disks) == ([], "")
    assert candidates(disks, may_be_older=True)[0] == ["iter_0000002", "iter_0000001"]


def test_a_release_of_one_node_is_loaded_by_all(disks: list[Path]) -> None:
    whole = save(disks[:1], 1, world_size=2).savers[0].directory
    (whole / "iter_0000001").rename(whole / "release")
    (whole / LATEST_FILE).write_text("release")
    held, nbytes = loaded(disks)
    assert held == 1 and nbytes > 0
    with pytest.raises(CheckpointError, match=r"node 0 \(\S+\) has release, node 1 \(\S+\) has none"):
        candidates(disks, 7)


def test_a_file_in_the_place_of_a_part_is_no_part(disks: list[Path], tmp_path: Path) -> None:
    save(disks, 1)
    both = all_in(disks, tmp_path / "both")
    disks[1].joinpath("iter_0000001").rename(tmp_path / "away")
    (disks[1] / "iter_0000001").touch()
    held, nbytes = loaded([both, disks[1]])
    assert held == 1 and nbytes > 0


def test_a_folder_that_cannot_be_used_is_an_error_that_names_the_node(disks: list[Path]) -> None:
    save(disks, 1)
    with pytest.raises(CheckpointError, match=r"is one checkpoint; give its parent folder.*\(on node 0 \(\S+\)\)"):
        on_ranks(WORLD_SIZE, finders([disks[0] / "iter_0000001", disks[1]], WORLD_SIZE))
