"""The names of folders, which one is loaded, and which ones are deleted."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.small_state import Ranks, check_holds, state_at
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.checkpoint.candidates import find_candidates
from megatron_zpp.checkpoint.folders import (
    LATEST_FILE,
    Leftover,
    Stage,
    check_latest_can_move,
    complete_iterations,
    delete_checkpoint,
    delete_or_restore,
    find_checkpoint,
    iteration_folder,
    iterations_to_delete,
    leftovers,
    move_latest,
    older_checkpoints,
    put_in_place,
    read_latest,
    staged_folder,
)
from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, MARKER_FILE, CheckpointError, marker_json
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.stored_flags import open_checkpoint
from megatron_zpp.config.cli import parse_flags

ITERATIONS = st.sets(st.integers(1, 40), max_size=15)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoints of iterations 1 and 2, for tests to copy."""
    directory = tmp_path_factory.mktemp("saved")
    for iteration in (1, 2):
        Ranks(directory, state_at(iteration), world_size=1).save(iteration)
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


@given(ITERATIONS, st.integers(1, 40), st.none() | st.integers(1, 6), st.none() | st.integers(1, 10))
def test_what_may_go_is_neither_among_the_last_nor_a_multiple_nor_later(
    iterations: set[int], current: int, keep_last: int | None, retain_interval: int | None
) -> None:
    present = iterations | {current}
    gone = set(iterations_to_delete(present, current, keep_last, retain_interval))
    until_now = sorted(iteration for iteration in present if iteration <= current)
    if keep_last is None and retain_interval is None:
        assert not gone
        return
    last = set(until_now[-(keep_last or 1) :])
    multiples = {iteration for iteration in present if retain_interval is not None and iteration % retain_interval == 0}
    assert gone == set(until_now) - last - multiples
    assert current not in gone


def test_the_latest_is_loaded_or_the_one_asked_for(directory: Path) -> None:
    assert find_checkpoint(directory, None) == iteration_folder(directory, 2)
    assert find_checkpoint(directory, 1) == iteration_folder(directory, 1)
    assert find_checkpoint(directory / "none", None) is None
    with pytest.raises(CheckpointError, match="--ckpt-step 3: .* it holds 1, 2"):
        find_checkpoint(directory, 3)


@pytest.mark.parametrize("step", [None, 2])
def test_the_folder_of_one_checkpoint_is_refused_and_its_parent_named(
    directory: Path, step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    folder = iteration_folder(Path("checkpoints"), 2)
    refusal = r"^checkpoints/iter_0000002 is one checkpoint; give its parent folder, checkpoints \(with --load, --ckpt-step 2 chooses"
    with pytest.raises(CheckpointError, match=refusal):
        find_checkpoint(folder, step)
    with pytest.raises(CheckpointError, match=refusal):
        open_checkpoint(folder, step)
    monkeypatch.chdir(folder)
    with pytest.raises(CheckpointError, match=r"^\. is one checkpoint; give its parent folder, \.\. \(with --load, --ckpt-step 2 chooses"):
        find_checkpoint(Path(), step)


def test_weights_of_no_run_are_refused_without_a_number_of_their_iteration(directory: Path) -> None:
    iteration_folder(directory, 2).rename(directory / "release")
    with pytest.raises(CheckpointError, match=f"release is one checkpoint; give its parent folder, {directory}$"):
        find_checkpoint(directory / "release", None)


@pytest.mark.parametrize("last_good", ["", "--load-last-good-checkpoint"])
@pytest.mark.parametrize(
    ("files", "latest", "tool"),
    [
        (["iter_0000010/mp_rank_00/model_optim_rng.pt"], "10", "convert_from_megatron"),
        (["release/mp_rank_00_001/model_optim_rng.pt"], "release", "convert_from_megatron"),
        (["iter_0000010/.metadata", "iter_0000010/common.pt"], "10", "convert_from_megatron"),
        (["latest", "global_step10/mp_rank_00_model_states.pt"], None, "convert_from_megatron"),
        (["latest", "global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt"], "10", "convert_from_megatron"),
        (["mp_rank_00/model_optim_rng.pt"], None, "convert_from_megatron"),
        (["mp_rank_00_model_states.pt", "layer_01-model_00-model_states.pt"], None, "convert_from_megatron"),
        (["config.json", "model.safetensors"], None, "convert_from_hf"),
    ],
)
def test_a_checkpoint_of_another_program_is_refused_with_the_tool_that_converts_it(
    tmp_path: Path, files: list[str], latest: str | None, tool: str, last_good: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if latest is not None:
        (tmp_path / LATEST_FILE).write_text(latest)
    with pytest.raises(CheckpointError, match=f"convert it with tools/{tool}.py, and give the folder that this tool writes"):
        find_candidates(parse_flags(f"--load {tmp_path} {last_good}".split()).checkpoint)


@pytest.mark.parametrize("files", [["config.json", "model.safetensors"], ["global_step7/mp_rank_00_model_states.pt"]])
def test_checkpoints_beside_files_of_another_program_are_those_that_are_loaded_and_named(directory: Path, files: list[str]) -> None:
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()
    with pytest.raises(CheckpointError, match="--ckpt-step 5: .* it holds 1, 2"):
        find_checkpoint(directory, 5)
    (directory / LATEST_FILE).unlink()
    assert find_checkpoint(directory, None) is None
    last_good = parse_flags(f"--load {directory} --load-last-good-checkpoint".split()).checkpoint
    assert [folder.name for folder in find_candidates(last_good).folders] == ["iter_0000002", "iter_0000001"]


@pytest.mark.parametrize("text", ["", "iter_2", "-1", "2.5", "9" * 40, "\x80\x04\x95"])
def test_a_latest_file_that_names_no_iteration_is_refused(directory: Path, text: str) -> None:
    (directory / LATEST_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="instead of an iteration; choose one with --ckpt-step, .* holds 1, 2"):
        find_checkpoint(directory, None)


def test_a_latest_file_that_names_a_missing_iteration_says_what_there_is(directory: Path) -> None:
    move_latest(directory, "9")
    with pytest.raises(CheckpointError, match="names 9, which .* does not hold; choose one with --ckpt-step, it holds 1, 2"):
        find_checkpoint(directory, None)


def test_weights_of_no_run_are_found_under_their_name(directory: Path) -> None:
    (directory / "release").mkdir()
    move_latest(directory, "release")
    assert find_checkpoint(directory, None) == directory / "release"


def test_older_ones_come_newest_first(directory: Path) -> None:
    Ranks(directory, state_at(9), world_size=1).save(9)
    assert older_checkpoints(iteration_folder(directory, 9)) == [iteration_folder(directory, 2), iteration_folder(directory, 1)]
    assert older_checkpoints(iteration_folder(directory, 1)) == older_checkpoints(directory / "release") == []


def test_unfinished_and_half_deleted_folders_are_no_checkpoints(directory: Path) -> None:
    staged = [
        staged_folder(iteration_folder(directory, number), stage, "ab12") for number, stage in ((3, Stage.UNFINISHED), (1, Stage.REMOVED))
    ]
    for folder in staged:
        shutil.copytree(iteration_folder(directory, 2), folder)
    assert complete_iterations(directory) == [1, 2]
    assert leftovers(directory) == [Leftover(staged[1], Stage.REMOVED, "ab12"), Leftover(staged[0], Stage.UNFINISHED, "ab12")]


def test_manifests_of_checkpoints_are_verified_and_not_parsed_to_count_them(directory: Path) -> None:
    seal_text(iteration_folder(directory, 2), "{")
    assert complete_iterations(directory) == [1, 2]
    (iteration_folder(directory, 2) / MANIFEST_FILE).write_text("}")
    assert complete_iterations(directory) == [1]


def seal_text(folder: Path, text: str) -> None:
    (folder / MANIFEST_FILE).write_text(text)
    (folder / MARKER_FILE).write_text(marker_json(text))


def test_between_the_two_renames_of_a_replacement_the_old_checkpoint_is_found(directory: Path) -> None:
    final = iteration_folder(directory, 2)
    aside = staged_folder(final, Stage.REPLACED, "ab12")
    final.rename(aside)
    assert find_checkpoint(directory, None) == find_checkpoint(directory, 2) == aside
    check_holds(aside, 2)
    delete_or_restore(Leftover(aside, Stage.REPLACED, "ab12"))
    assert find_checkpoint(directory, None) == final and not aside.exists()


def test_of_two_replacements_that_died_each_iteration_finds_its_own_old_checkpoint(directory: Path) -> None:
    aside = {number: staged_folder(iteration_folder(directory, number), Stage.REPLACED, "ab12") for number in (1, 2)}
    for number, folder in aside.items():
        iteration_folder(directory, number).rename(folder)
    for number, folder in aside.items():
        assert find_checkpoint(directory, number) == folder
        check_holds(folder, number)


def test_a_replacement_leaves_one_checkpoint_the_new_one(directory: Path) -> None:
    final = iteration_folder(directory, 2)
    new = staged_folder(final, Stage.UNFINISHED, "ab12")
    final.rename(new)
    shutil.copytree(iteration_folder(directory, 1), final)
    put_in_place(new, final, "ab12")
    check_holds(final, 2)
    assert leftovers(directory) == []


def test_a_checkpoint_that_is_being_read_is_not_deleted(directory: Path) -> None:
    folder = iteration_folder(directory, 1)
    with CheckpointReader(folder):
        assert not delete_checkpoint(folder, "ab12")
    check_holds(folder, 1)
    assert delete_checkpoint(folder, "ab12")
    assert complete_iterations(directory) == [2] and leftovers(directory) == []


@pytest.mark.parametrize("gone", ["manifest", "folder"])
def test_a_checkpoint_that_somebody_else_deletes_meanwhile_counts_as_deleted(
    directory: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = iteration_folder(directory, 1)
    if gone == "manifest":
        shutil.rmtree(folder)
    else:  # between the look for readers and the rename
        monkeypatch.setattr(fcntl, "flock", lambda *_: shutil.rmtree(folder))
    assert delete_checkpoint(folder, "ab12")
    assert complete_iterations(directory) == [2] and leftovers(directory) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_checkpoint_that_the_file_system_does_not_give_up_stays_and_ends_no_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source))

    monkeypatch.setattr("megatron_zpp.checkpoint.folders.rename_durably", refuse)
    assert not delete_checkpoint(iteration_folder(directory, 1), "ab12")
    assert complete_iterations(directory) == [1, 2]


def test_a_checkpoint_that_was_moved_aside_counts_as_deleted_although_its_directory_was_not_synced(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename_only(source: Path, target: Path) -> None:
        source.rename(target)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))

    monkeypatch.setattr("megatron_zpp.checkpoint.folders.rename_durably", rename_only)
    assert delete_checkpoint(iteration_folder(directory, 1), "ab12")
    assert complete_iterations(directory) == [2] and leftovers(directory) == []


def test_a_file_system_without_locks_can_be_read_and_deleted_from(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    check_holds(iteration_folder(directory, 1), 1)
    assert delete_checkpoint(iteration_folder(directory, 1), "ab12")


def test_a_folder_in_the_place_of_latest_is_refused(tmp_path: Path) -> None:
    (tmp_path / LATEST_FILE).mkdir()
    with pytest.raises(CheckpointError, match=f"^--save {tmp_path}: {LATEST_FILE} is a folder, so that no checkpoint can be saved; remove"):
        check_latest_can_move("--save", tmp_path)


@pytest.mark.parametrize(
    "make",
    [lambda path: None, lambda path: path.write_bytes(b"\xff"), os.mkfifo, lambda path: path.symlink_to(path.parent)],
    ids=["missing", "not text", "pipe", "link to a folder"],
)
def test_whatever_else_is_in_the_place_of_latest_is_replaced(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / LATEST_FILE)
    check_latest_can_move("--save", tmp_path)
    move_latest(tmp_path, "7")
    assert read_latest(tmp_path) == "7"
