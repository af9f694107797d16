"""Saves on ranks that are threads. The files that a crash leaves are tested in test_crashes."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from harness.patience import PATIENCE_SECONDS
from harness.small_state import Ranks, check_holds, manifest_at, set_state, shares, state_at

from megatron_zpp.checkpoint import durable, unfinished
from megatron_zpp.checkpoint.folders import LATEST_FILE, Stage, complete_iterations, iteration_folder, leftovers, staged_folder
from megatron_zpp.checkpoint.manifest import CheckpointError, read_manifest
from megatron_zpp.checkpoint.saver import CheckpointSaver, SavedCheckpoint, SaveOptions
from megatron_zpp.checkpoint.snapshot import HostSnapshot
from megatron_zpp.system.owner import own_token

IN_BACKGROUND = SaveOptions(in_background=True)


class SlowDisk:
    """Blocks every write until `release` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        write_file = unfinished.write_file

        def wait_and_write(*arguments: object) -> object:
            assert self.released.wait(PATIENCE_SECONDS)
            return write_file(*arguments)

        monkeypatch.setattr(unfinished, "write_file", wait_and_write)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("options", [SaveOptions(), IN_BACKGROUND], ids=["waiting", "in background"])
def test_what_is_saved_is_what_is_read_back_bit_for_bit(tmp_path: Path, world_size: int, options: SaveOptions) -> None:
    ranks = Ranks(tmp_path, state_at(1), world_size, options)
    ranks.save(1)
    ranks.finish()
    check_holds(tmp_path / "iter_0000001", 1)
    assert names(tmp_path) == {"iter_0000001", LATEST_FILE} and (tmp_path / LATEST_FILE).read_text() == "1"
    files = {f"rank_{rank:05d}.safetensors" for rank in range(world_size)}
    assert names(tmp_path / "iter_0000001") == {"manifest.json", "complete.json", *files}


def test_a_save_in_the_background_holds_the_state_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    state = state_at(1)
    ranks = Ranks(tmp_path, state, options=IN_BACKGROUND)
    counts = {"norm.weight": 1}
    manifest = manifest_at(1)
    manifest = replace(manifest, run={**manifest.run, "optimizer_steps": 1, "unused_steps": counts})
    ranks.on_each(lambda saver: saver.save(manifest))
    set_state(state, 2)  # training continues
    counts["norm.weight"] = 2
    assert complete_iterations(tmp_path) == [] and not (tmp_path / LATEST_FILE).exists()
    assert ranks.on_each(lambda saver: saver.check()) == [None, None]
    disk.released.set()
    first, other = ranks.on_each(lambda saver: saver.finish())
    assert isinstance(first, SavedCheckpoint) and first.iteration == 1 and other is None
    check_holds(tmp_path / "iter_0000001", 1)
    assert read_manifest(tmp_path / "iter_0000001").run["unused_steps"] == {"norm.weight": 1}


def test_saving_in_the_background_returns_before_the_state_is_copied_and_the_next_update_waits_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, copy = threading.Event(), HostSnapshot.copy

    def wait_and_copy(snapshot: HostSnapshot) -> None:
        assert released.wait(PATIENCE_SECONDS)
        copy(snapshot)

    monkeypatch.setattr(HostSnapshot, "copy", wait_and_copy)
    state = state_at(1)
    ranks = Ranks(tmp_path, state, options=IN_BACKGROUND)
    ranks.on_each(lambda saver: saver.save(manifest_at(1)))
    update = threading.Thread(target=lambda: (ranks.on_each(lambda saver: saver.wait_for_copy()), set_state(state, 2)))
    update.start()
    update.join(0.2)
    assert update.is_alive()
    released.set()
    update.join(PATIENCE_SECONDS)
    ranks.finish()
    check_holds(tmp_path / "iter_0000001", 1)


def test_an_error_of_copying_ends_the_step_and_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(snapshot: HostSnapshot) -> None:
        raise RuntimeError("the bus is gone")

    monkeypatch.setattr(HostSnapshot, "copy", fail)
    ranks = Ranks(tmp_path, state_at(1), options=IN_BACKGROUND)
    ranks.on_each(lambda saver: saver.save(manifest_at(1)))
    with pytest.raises(RuntimeError, match="the bus is gone"):
        ranks.savers[0].wait_for_copy()
    with pytest.raises(CheckpointError, match="the bus is gone"):
        ranks.finish()
    assert names(tmp_path) == set()


def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    state = state_at(1)
    ranks = Ranks(tmp_path, state, options=IN_BACKGROUND)
    ranks.save(1)
    assert [saver.iteration_under_way for saver in ranks.savers] == [1, 1]
    set_state(state, 2)
    second = threading.Thread(target=ranks.save, args=(2,))
    second.start()
    second.join(0.2)
    assert second.is_alive() and complete_iterations(tmp_path) == []
    disk.released.set()
    second.join(PATIENCE_SECONDS)
    ranks.finish()
    for iteration in (1, 2):
        check_holds(iteration_folder(tmp_path, iteration), iteration)


def test_without_waiting_rank_0_learns_that_a_save_is_done_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, state_at(1), options=IN_BACKGROUND)
    ranks.save(1)
    while (found := ranks.savers[0].check()) is None:
        pass
    assert found.iteration == 1 and found.nbytes > 0
    assert ranks.savers[0].check() is None and ranks.savers[1].check() is None
    assert ranks.on_each(lambda saver: saver.finish()) == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_the_background_surfaces_at_the_next_step_and_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    state = state_at(1)
    ranks = Ranks(tmp_path, state, options=IN_BACKGROUND)
    ranks.save(1)
    ranks.finish()
    _break_disk(monkeypatch, rank)
    set_state(state, 2)
    ranks.save(2)
    with pytest.raises(CheckpointError, match=f"rank_0000{rank}.safetensors cannot be written"):
        while True:
            ranks.savers[rank].check()
    with pytest.raises(CheckpointError, match=f"cannot be written .* \\(on rank {rank} of 2\\)"):
        ranks.finish()
    assert names(tmp_path) == {"iter_0000001", LATEST_FILE}
    check_holds(tmp_path / "iter_0000001", 1)


def test_an_error_of_one_rank_is_raised_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _break_disk(monkeypatch, 1)
    ranks = Ranks(tmp_path, state_at(1), 3)

    def error_of(saver: CheckpointSaver) -> str:
        with pytest.raises(CheckpointError) as error:
            saver.save(manifest_at(1))
        return str(error.value)

    texts = ranks.on_each(error_of)
    assert len(set(texts)) == 1 and "(on rank 1 of 3)" in str(texts[0])
    assert names(tmp_path) == set()


def _break_disk(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    write_file = unfinished.write_file

    def fail_on_one(path: Path, *arguments: object) -> object:
        if path.name == f"rank_{rank:05d}.safetensors":
            raise CheckpointError(f"{path} cannot be written (No space left on device)")
        return write_file(path, *arguments)

    monkeypatch.setattr(unfinished, "write_file", fail_on_one)


def test_too_little_space_is_said_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**30, 0, 2**20))
    monkeypatch.setattr(unfinished, "write_file", None)
    with pytest.raises(CheckpointError, match="the checkpoint takes 0.001 GiB and .* has 0.001 GiB left; free some, keep fewer"):
        Ranks(tmp_path, state_at(1)).save(1)
    assert names(tmp_path) == set()


def test_a_folder_that_one_rank_does_not_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "VISIBLE_WITHIN_SECONDS", 0.1)
    ranks = Ranks(tmp_path / "here", state_at(1))
    ranks.savers[1].directory = tmp_path / "elsewhere"
    with pytest.raises(
        CheckpointError, match="does not exist on this rank's machine; checkpoints .--save. need a folder .* share .*rank 1 of 2"
    ):
        ranks.save(1)
    assert names(tmp_path / "here") == set()


def test_the_same_iteration_can_be_saved_again(tmp_path: Path) -> None:
    state = state_at(1)
    ranks = Ranks(tmp_path, state)
    ranks.save(1)
    set_state(state, 2)
    ranks.on_each(lambda saver: saver.save(manifest_at(2)))
    Ranks(tmp_path, state_at(1), world_size=3).save(1)
    check_holds(tmp_path / "iter_0000001", 1)
    assert (tmp_path / "iter_0000001" / "rank_00002.safetensors").exists()
    assert (tmp_path / LATEST_FILE).read_text() == "1"


def test_the_next_save_deletes_what_dead_runs_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    Ranks(tmp_path, state_at(1)).save(1)
    token = own_token()
    dead = staged_folder(iteration_folder(tmp_path, 5), Stage.UNFINISHED, token + "0")
    living = staged_folder(iteration_folder(tmp_path, 6), Stage.UNFINISHED, token)
    half_deleted = staged_folder(iteration_folder(tmp_path, 0), Stage.REMOVED, token)
    for folder in (dead, living, half_deleted, tmp_path / "notes"):
        folder.mkdir()
    Ranks(tmp_path, state_at(2)).save(2)
    assert names(tmp_path) == {"iter_0000001", "iter_0000002", living.name, "notes", LATEST_FILE}


def test_what_a_living_run_of_another_process_replaces_or_deletes_is_left_to_it(tmp_path: Path) -> None:
    Ranks(tmp_path, state_at(1)).save(1)
    other = subprocess.Popen(["sleep", "60"])
    place, *_ = own_token().split("-")
    started = int(Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19])
    token = f"{place}-{other.pid:x}-{started:x}"
    theirs = [staged_folder(iteration_folder(tmp_path, 5), stage, token) for stage in Stage]
    for folder in theirs:
        folder.mkdir()
    latest = tmp_path / f"{LATEST_FILE}.new-{token}"
    latest.touch()
    Ranks(tmp_path, state_at(2)).save(2)
    assert all(path.exists() for path in (*theirs, latest))
    other.kill()
    other.wait()
    Ranks(tmp_path, state_at(3)).save(3)
    assert not any(path.exists() for path in (*theirs, latest))


def test_nothing_is_written_through_a_link_in_the_place_of_a_temporary_file(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    for name in (f"{LATEST_FILE}.new", f"{LATEST_FILE}.new-{own_token()}"):
        (tmp_path / name).symlink_to(elsewhere)
    Ranks(tmp_path, state_at(1)).save(1)
    assert elsewhere.read_text() == "mine" and (tmp_path / LATEST_FILE).read_text() == "1" and not (tmp_path / LATEST_FILE).is_symlink()


@pytest.mark.parametrize("looks", [0, 1], ids=["before the save", "during the save"])
def test_a_run_that_has_lost_its_lock_writes_no_checkpoint_and_every_rank_says_so(tmp_path: Path, looks: int) -> None:
    ranks = Ranks(tmp_path, state_at(1))
    ranks.save(1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    left = iter([None] * looks)

    def check_lock() -> None:
        if next(left, "none") == "none":
            raise CheckpointError("the lock is lost")

    ranks.savers[0]._check_lock = check_lock
    for saver in ranks.savers:
        saver._options = SaveOptions(keep_last=1)
    with pytest.raises(CheckpointError, match="the lock is lost"):
        ranks.save(2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_only_the_wanted_checkpoints_are_kept(tmp_path: Path) -> None:
    state = state_at(0)
    ranks = Ranks(tmp_path, state, options=SaveOptions(keep_last=2, retain_interval=4))
    for iteration in range(1, 8):
        set_state(state, iteration)
        ranks.save(iteration)
    assert complete_iterations(tmp_path) == [4, 6, 7]
    for iteration in (4, 6, 7):
        check_holds(iteration_folder(tmp_path, iteration), iteration)
    assert leftovers(tmp_path) == []


def test_a_damaged_checkpoint_does_not_count_among_those_to_keep(tmp_path: Path) -> None:
    state = state_at(1)
    Ranks(tmp_path, state).save(1)
    set_state(state, 2)
    Ranks(tmp_path, state).save(2)
    (tmp_path / "iter_0000002" / "complete.json").unlink()
    set_state(state, 3)
    Ranks(tmp_path, state, options=SaveOptions(keep_last=2)).save(3)
    assert complete_iterations(tmp_path) == [1, 3]


def test_files_are_readable_for_others_as_the_umask_allows(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        Ranks(tmp_path, state_at(1)).save(1)
    finally:
        os.umask(previous)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "iter_0000001").iterdir()} == {"0o644"}


def test_every_piece_of_every_rank_is_in_the_manifest(tmp_path: Path) -> None:
    Ranks(tmp_path, state_at(1), 4).save(1)
    manifest = read_manifest(tmp_path / "iter_0000001")
    stored = {(piece.file, piece.parameter, state, piece.start, piece.stop) for piece in manifest.pieces for state in piece.offsets}
    expected = {
        (share.file_name, piece.parameter, piece.state, piece.start, piece.stop)
        for share in shares(state_at(1), 4)
        for piece in share.pieces
    }
    assert stored == expected
