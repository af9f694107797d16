"""What a run says at its start about the files that its flags name."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.stored_manifest import count_parsed_manifests, manifest_of_run, write_manifest

from megatron_zpp.checkpoint.disk import Disk
from megatron_zpp.checkpoint.folders import iteration_folder
from megatron_zpp.checkpoint.manifest import MARKER_FILE
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.start import ResumeSource, describe_start, find_resume_source, flags_that_differ

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 5 --mock-data "


def said(flags: str, progress: Progress, shape: str = SHAPE) -> str:
    return describe_start(resolve(parse_flags((shape + flags).split()), 1, None), ResumeSource(None, None), progress)


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        ("--bf16", "", ["--bf16 True there and False here"]),
        ("--zero-stage 3 --zero-quantized-gradients", "--zero-stage 3", ["--zero-quantized-gradients True there and False here"]),
        ("--diloco-sync-period 8", "--diloco-sync-period 8 --diloco-overlap-steps 1", ["--diloco-overlap-steps 0 there and 1 here"]),
        ("--diloco-sync-period 8", "", ["--diloco-sync-period 8 there and None here"]),
        ("--diloco-sync-period 8", "--diloco-sync-period 8 --zero-stage 1", []),
    ],
)
def test_a_run_that_goes_on_names_other_values_of_flags_that_decide_its_numbers(there: str, here: str, words: list[str]) -> None:
    then, now = (resolve(parse_flags((SHAPE + flags).split()), 1, None) for flags in (there, here))
    assert flags_that_differ(now, manifest_of_run(then, 128).flags) == words


@pytest.mark.parametrize("flags", ["", "--save {}", "--load {}"])
def test_a_run_without_data_says_last_that_it_trains_on_generated_tokens(tmp_path: Path, flags: str) -> None:
    said_by_run = said(flags.format(tmp_path / "new"), Progress(), SHAPE.replace("--mock-data", ""))
    assert said_by_run.splitlines()[-1].startswith("WARNING: no flag names data, so this run trains on generated tokens; give --data-path")
    assert "generated tokens" not in said(flags.format(tmp_path / "new"), Progress())


@pytest.mark.parametrize(
    ("earlier", "flags", "iteration", "is_told"),
    [("{}\n", "", 0, True), ("{}\n", "", 3, False), ("{}\n", "--skip-train", 0, False), ("", "", 0, False), (None, "", 0, False)],
)
def test_a_run_that_starts_anew_with_the_log_of_another_run_says_so(
    tmp_path: Path, earlier: str | None, flags: str, iteration: int, is_told: bool
) -> None:
    log = tmp_path / "run.jsonl"
    if earlier is not None:
        log.write_text(earlier)
    text = said(f"--log-jsonl {log} {flags}", Progress(iteration))
    assert (f"WARNING: --log-jsonl {log} has lines of an earlier run, and this run does not resume it" in text) == is_told


@pytest.mark.parametrize(("flags", "iteration", "is_told"), [("", 0, True), ("", 3, True), ("", 7, False), ("--skip-train", 0, False)])
def test_a_run_that_begins_before_the_checkpoints_of_its_folder_says_so(tmp_path: Path, flags: str, iteration: int, is_told: bool) -> None:
    (tmp_path / "iter_0000007").mkdir()
    text = said(f"--save {tmp_path} {flags}", Progress(iteration))
    begins = (
        f"WARNING: --save {tmp_path} holds checkpoints up to iteration 7, and this run begins at iteration {iteration}: it replaces those"
    )
    assert text == (
        f"{begins} of the same iterations, and the latest will be its own. To resume, give --load {tmp_path}" if is_told else ""
    )
    assert said(f"--save {tmp_path / 'new'}", Progress()) == ""


def test_a_run_that_loads_nothing_says_which_iterations_are_there_without_a_latest_one(tmp_path: Path) -> None:
    flags = f"--load {tmp_path / 'saved'}"
    assert said(flags, Progress()) == f"WARNING: {flags} holds no checkpoint; starting from scratch"
    for iteration in (3, 12):
        (tmp_path / "saved" / f"iter_{iteration:07d}").mkdir(parents=True)
    text = said(flags, Progress())
    assert f"{flags} has no latest_checkpointed_iteration.txt, only iterations 3, 12 (--ckpt-step or --load-last-good-checkpoint" in text


def test_a_run_that_starts_anew_beside_checkpoints_of_a_like_name_names_them(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    expected = f"WARNING: --load {tmp_path / 'save'} holds no checkpoint (did you mean {tmp_path / 'saved'}?); starting from scratch"
    assert said(f"--load {tmp_path / 'save'}", Progress()) == expected
    assert "did you mean" not in said(f"--load {tmp_path / 'save'} --save {tmp_path / 'save'}", Progress())  # the first job of a run


def test_standard_streams_and_the_null_device_have_no_earlier_run() -> None:
    assert [said(f"--log-jsonl {path}", Progress()) for path in ("/dev/stdout", "/dev/null")] == ["", ""]


@pytest.mark.parametrize(("flags", "damaged"), [("", ()), ("--load-last-good-checkpoint", ()), ("--load-last-good-checkpoint", (4,))])
def test_a_run_parses_the_manifest_that_it_loads_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, damaged: tuple[int, ...]
) -> None:
    config = resolve(parse_flags(f"{SHAPE} --load {tmp_path} {flags}".split()), 1, None)
    for iteration in (2, 4):
        write_manifest(tmp_path, replace(manifest_of_run(config, 128, iteration), shapes={}))  # without tensors all of them are good
    for iteration in damaged:
        (iteration_folder(tmp_path, iteration) / MARKER_FILE).unlink()
    parsed = count_parsed_manifests(monkeypatch)
    alone: Any = SimpleNamespace(rank=0, world_size=1, agreement=nullcontext, gather_texts=lambda text: [text])
    source = find_resume_source(config, alone, Disk.of_all(0, 1))
    assert source.stored is not None and parsed == [source.stored.folder] == [iteration_folder(tmp_path, 2 if damaged else 4)]
    source.close()
