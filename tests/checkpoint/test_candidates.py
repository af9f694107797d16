"""Which checkpoints a run may start from, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.stored_manifest import count_parsed_manifests, manifest_of_run, write_manifest

from megatron_zpp.checkpoint.candidates import Candidates, check_may_begin_anew, find_candidates
from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.checkpoint.folders import LATEST_FILE, iteration_folder
from megatron_zpp.checkpoint.manifest import MARKER_FILE, CheckpointError
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.stored_run import find_stored_run

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 5"
LAST_GOOD = "--load-last-good-checkpoint"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the manifests of iterations 1, 2 and 4, of which 4 is the latest."""
    config = resolve(parse_flags(SHAPE.split()), 1, None)
    for iteration in (1, 2, 4):
        write_manifest(tmp_path, manifest_of_run(config, 128, iteration=iteration))
    return tmp_path


def found(directory: Path, flags: str = LAST_GOOD) -> Candidates:
    return find_candidates(parse_flags(f"--load {directory} {flags}".split()).checkpoint)


def folders(directory: Path, *iterations: int) -> tuple[Path, ...]:
    return tuple(iteration_folder(directory, iteration) for iteration in iterations)


def name_latest(directory: Path, text: str | None) -> None:
    path = directory / LATEST_FILE
    path.unlink()
    if text is not None:
        path.write_text(text)


@pytest.mark.parametrize(
    ("flags", "iterations"), [("", [4]), ("--ckpt-step 2", [2]), (LAST_GOOD, [4, 2, 1]), (f"{LAST_GOOD} --ckpt-step 2", [2, 1])]
)
def test_older_ones_are_tried_only_with_their_flag(directory: Path, flags: str, iterations: list[int]) -> None:
    assert found(directory, flags) == Candidates(folders(directory, *iterations))


@pytest.mark.parametrize("text", ["", "iter_4", "-1", "\x80\x04"])
def test_where_nothing_names_the_latest_all_are_tried_newest_first(directory: Path, text: str) -> None:
    name_latest(directory, text)
    candidates = found(directory)
    assert candidates.folders == folders(directory, 4, 2, 1)
    (notice,) = candidates.notices
    assert notice.startswith(f"WARNING: passed over, because {directory / LATEST_FILE} holds {text!r} instead of an iteration")
    with pytest.raises(CheckpointError, match="instead of an iteration"):
        found(directory, "")
    with pytest.raises(CheckpointError, match="--ckpt-step 3: .* holds no checkpoint of this iteration"):
        found(directory, f"{LAST_GOOD} --ckpt-step 3")


def test_a_latest_file_that_cannot_be_read_does_not_name_the_latest(directory: Path) -> None:
    name_latest(directory, None)
    (directory / LATEST_FILE).mkdir()
    candidates = found(directory)
    assert candidates.folders == folders(directory, 4, 2, 1) and "cannot be read" in candidates.notices[0]


def test_where_the_latest_is_missing_only_older_ones_are_tried_because_newer_ones_are_of_another_branch(directory: Path) -> None:
    name_latest(directory, "3")
    candidates = found(directory)
    assert candidates.folders == folders(directory, 2, 1)
    assert f"{directory / LATEST_FILE} names 3, which {directory} does not hold" in candidates.notices[0]
    for text in ("0", "release"):
        name_latest(directory, text)
        with pytest.raises(CheckpointError, match=f"names {text}, .* choose one with --ckpt-step, it holds 1, 2, 4"):
            found(directory)


def test_without_a_latest_file_a_run_starts_anew_and_with_the_flag_goes_on_from_the_newest(directory: Path) -> None:
    name_latest(directory, None)
    assert found(directory, "") == Candidates()
    candidates = found(directory)
    assert candidates.folders == folders(directory, 4, 2, 1)
    assert candidates.notices == (f"WARNING: {directory} has no {LATEST_FILE}; the newest good checkpoint there is loaded",)
    assert found(directory / "none") == Candidates()


def test_pretrained_weights_are_found_by_the_same_rules(directory: Path, tmp_path: Path) -> None:
    name_latest(directory, "")
    flags = f"--pretrained-checkpoint {directory}"
    assert found(tmp_path / "none", f"{LAST_GOOD} {flags}").folders == folders(directory, 4, 2, 1)
    with pytest.raises(CheckpointError, match="instead of an iteration"):
        found(tmp_path / "none", flags)


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim", "--exit-on-missing-checkpoint"])
def test_a_flag_that_needs_a_checkpoint_refuses_a_folder_without_one_and_names_the_one_that_was_meant(tmp_path: Path, flag: str) -> None:
    for name in ("my_checkpoints", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LATEST_FILE).write_text("4")
    for given, meant in (("my_chekpoints", "my_checkpoints"), ("", "my_checkpoints"), ("unlike", None)):
        load = tmp_path / given
        checkpoint = parse_flags(f"--load {load} {flag}".split()).checkpoint
        assert find_candidates(checkpoint) == Candidates()
        with pytest.raises(CheckpointError) as error:
            check_may_begin_anew(checkpoint)
        hint = f" (did you mean {tmp_path / meant}?)" if meant else ""
        assert str(error.value) == f"--load {load} holds no checkpoint{hint}, but {flag} needs one; correct the path, or leave {flag} out"


@pytest.mark.parametrize("flags", ["", LAST_GOOD, "--override-opt-param-scheduler", "--use-checkpoint-args"])
def test_flags_of_a_job_that_is_repeated_let_it_begin_anew(tmp_path: Path, flags: str) -> None:
    check_may_begin_anew(parse_flags(f"--load {tmp_path} {flags}".split()).checkpoint)


@pytest.mark.parametrize("flag", ["--ckpt-step 3 --load", "--pretrained-checkpoint"])
def test_a_folder_without_the_checkpoint_that_is_asked_for_is_refused_with_the_one_that_was_meant(directory: Path, flag: str) -> None:
    typo = directory.with_name(f"{directory.name}x")
    with pytest.raises(CheckpointError, match=rf"\(did you mean {directory}\?\)"):
        find_candidates(parse_flags(f"{flag} {typo}".split()).checkpoint)


def test_no_manifest_is_parsed_twice_to_find_the_newest_that_can_be_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (iteration_folder(directory, 4) / MARKER_FILE).unlink()
    parsed = count_parsed_manifests(monkeypatch)
    assert find_stored_run(parse_flags(f"--load {directory} {LAST_GOOD}".split()).checkpoint) is not None
    assert parsed == [iteration_folder(directory, 2)]


@pytest.mark.parametrize("latest", ["4", ""])
def test_flags_and_run_come_from_the_same_checkpoint_where_manifests_are_damaged(directory: Path, latest: str) -> None:
    name_latest(directory, latest)
    (iteration_folder(directory, 4) / MARKER_FILE).unlink()
    config = with_checkpoint_args(parse_flags(f"--load {directory} {LAST_GOOD} --use-checkpoint-args --train-iters 5".split()))
    stored = find_stored_run(config.checkpoint)
    assert stored is not None and stored.folder == iteration_folder(directory, 2)
    assert config.model.hidden_size == 32
    assert any(notice.startswith(f"--use-checkpoint-args: from {stored.folder}: ") for notice in config.notices)
