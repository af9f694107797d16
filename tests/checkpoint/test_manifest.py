"""The manifest and its marker."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.small_state import Ranks, state_at

from megatron_zpp.checkpoint.manifest import (
    MANIFEST_FILE,
    MARKER_FILE,
    CheckpointError,
    DamagedCheckpointError,
    is_complete,
    marker_json,
    read_manifest,
)
from megatron_zpp.checkpoint.stored_flags import padded_vocab_size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Ranks(tmp_path, state_at(7)).save(7)
    return tmp_path / "iter_0000007"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest and adapts the marker, as an attacker would do."""
    members = json.loads((folder / MANIFEST_FILE).read_text())
    change(members)
    text = json.dumps(members)
    (folder / MANIFEST_FILE).write_text(text)
    (folder / MARKER_FILE).write_text(marker_json(text))


ORDER = {
    "corpus": "corpus",
    "lengths_sha256": "0" * 64,
    "beginnings_sha256": "0" * 64,
    "document_count": 8,
    "first_document": 0,
    "stop_document": 8,
    "token_count": 100,
    "sample_count": 3,
    "seq_length": 32,
    "seed": 1,
    "share": 1.0,
}
READING: dict[str, Any] = {"first_sample": 0, "seq_length": 32, "tokenizer": "any", "splits": {"train": [ORDER]}}


def read(members: dict[str, Any], **values: object) -> None:
    """Makes the manifest one of a run that has read samples of 32 tokens."""
    tokens = 32 * members["consumed_samples"]
    members["run"].update(consumed_tokens=tokens, scheduled_tokens=tokens, readings=[{**READING, **values}])


def test_a_manifest_may_say_what_its_run_has_read(folder: Path) -> None:
    rewrite(folder, read)
    assert read_manifest(folder).run["readings"] == [READING]


def test_a_manifest_reads_back_as_it_was_written(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest.to_json() == (folder / MANIFEST_FILE).read_text()
    assert manifest.iteration == 7 and len(manifest.files) == 2


@pytest.mark.parametrize("file", [MANIFEST_FILE, MARKER_FILE])
def test_every_flipped_byte_of_manifest_or_marker_is_found(folder: Path, file: str) -> None:
    whole = (folder / file).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 50)):
        (folder / file).write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpointError, match=str(folder)):
            read_manifest(folder)


@pytest.mark.parametrize("file", [MANIFEST_FILE, MARKER_FILE])
def test_without_manifest_or_marker_a_folder_is_no_checkpoint(folder: Path, file: str) -> None:
    (folder / file).unlink()
    assert not is_complete(folder)
    with pytest.raises(DamagedCheckpointError, match=f"{file} cannot be read .*incomplete; choose an older one with --ckpt-step"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda members: members["files"][0].update(name="../../elsewhere"), "must be the name of a file"),
        (lambda members: members["files"][0].update(name=".."), "must be the name of a file"),
        (lambda members: members["files"][0]["checksums"].pop(), "checksums"),
        (lambda members: members["pieces"][0].update(stop=10**9), "has a piece from"),
        (lambda members: members["pieces"][0].update(file="other"), "other"),
        (lambda members: members["pieces"][0].update(parameter="other"), "other"),
        (lambda members: members["pieces"][0].update(offsets={"weight": 10**9}), "at byte 1000000000"),
        (lambda members: members["pieces"][0].update(offsets={"other": 800}), "has other of"),
        (lambda members: members["states"].update(weight="I8"), "elements of type I8"),
        (lambda members: members["pieces"][0].update(columns=[0, 21]), "columns 0 to 21 of embedding.weight, which has shape [60, 20]"),
        (lambda members: members["pieces"][0].update(columns=[7, 7]), "columns 7 to 7 of embedding.weight"),
        (lambda members: members["pieces"][0].update(columns=[0, 1], stop=61), "has 60 elements in columns 0 to 1"),
        (lambda members: members["pieces"][0].update(parameter="norm.weight", columns=[0, 1]), "norm.weight, which has shape [20]"),
        (lambda members: members["pieces"][0].update(columns=[1]), "pieces[0].columns must be a list of two numbers, not [1]"),
        (lambda members: members["pieces"][0].update(columns=[0, 1, 2]), "pieces[0].columns must be a list of two numbers, not [0, 1, 2]"),
        (
            lambda members: members["pieces"][0].update(columns=[0, -1]),
            "pieces[0].columns must be a list of numbers, each a whole number from 0 to 2^63 - 1, not [0, -1]",
        ),
        (
            lambda members: members["pieces"][0].update(columns=[0, 0.5]),
            "pieces[0].columns must be a list of numbers, each a whole number from 0 to 2^63 - 1, not [0, 0.5]",
        ),
        (lambda members: members["pieces"][0].update(columns=None), "pieces[0].columns must be a list, not null"),
        (lambda members: members["pieces"][0]["offsets"].update(weight=members["pieces"][0]["offsets"]["weight"] + 2), "has weight of"),
        (lambda members: members.update(chunk_bytes=0), "chunks of 0 bytes"),
        (lambda members: members.update(chunk_bytes=510), "chunks of 510 bytes"),
        (lambda members: members.update(iteration=-5), "iteration must be a whole number from 0 to 2^63 - 1, not -5"),
        (lambda members: members.update(iteration=2**70), f"iteration must be a whole number from 0 to 2^63 - 1, not {2**70}"),
        (lambda members: members.update(consumed_samples=2**63 - 1), f"has consumed_samples {2**63 - 1}, more than {2**40}"),
        (lambda members: members["run"].update(scheduled_samples=2**62), f"has scheduled_samples {2**62}, more than {2**40}"),
        (lambda members: members.update(iteration=6), "is that of iteration 6"),
        (lambda members: members.update(iteration=float("nan")), "iteration must be a whole number from 0 to 2^63 - 1, not NaN"),
        (lambda members: members.update(iteration=True), "iteration must be a whole number from 0 to 2^63 - 1, not true"),
        (lambda members: members.update(consumed_samples="3"), 'consumed_samples must be a whole number from 0 to 2^63 - 1, not "3"'),
        (
            lambda members: members["run"].update(scheduled_samples=-1),
            "run.scheduled_samples must be a whole number from 0 to 2^63 - 1, not -1",
        ),
        (
            lambda members: members["run"].update(optimizer_steps=0.5),
            "run.optimizer_steps must be a whole number from 0 to 2^63 - 1, not 0.5",
        ),
        (
            lambda members: members["run"].update(unused_steps={"a": -1}),
            "run.unused_steps.a must be a whole number from 0 to 2^63 - 1, not -1",
        ),
        (lambda members: members["run"].update(unused_steps={"a": 1 << 40}), "run.unused_steps must be numbers up to run.optimizer_steps"),
        (
            lambda members: members["run"].update(loss_scaler={"scale": float("inf")}),
            "run.loss_scaler.scale must be a finite number, not Infinity",
        ),
        (lambda members: members["run"].update(late_parameters="a"), "run.late_parameters must be"),
        (lambda members: members["run"].pop("optimizer_steps"), "lacks run.optimizer_steps"),
        (lambda members: members.update(run={"x": 1}), "lacks run.scheduled_samples"),
        (lambda members: members["run"].pop("loss_scaler"), "lacks run.loss_scaler"),
        (lambda members: members["run"].update(loss_scaler={"scale": 0}), "run.loss_scaler.scale must be a number above 0, not 0"),
        (lambda members: members["run"].update(loss_scaler={"scale": 1, "good_steps": 3}), "lacks run.loss_scaler.patience"),
        (lambda members: members["files"][0].update(nbytes=-1), "files[0].nbytes must be a whole number from 0 to 2^63 - 1, not -1"),
        (lambda members: members["files"][0].update(name=7), "files[0].name must be a string of Unicode characters, not 7"),
        (lambda members: members["files"][0].update(name="a\0b"), "must be the name of a file"),
        (lambda members: members["files"][0].update(checksums="ab"), 'files[0].checksums must be a list, not "ab"'),
        (
            lambda members: members["pieces"][0].update(start=float("inf")),
            "pieces[0].start must be a whole number from 0 to 2^63 - 1, not Infinity",
        ),
        (lambda members: members["pieces"][0].update(offsets=[1]), "pieces[0].offsets must be an object, not [1]"),
        (lambda members: members["pieces"].append(3), "must be an object, not 3"),
        (lambda members: members["pieces"][0].update(extra=1), "has the unknown key pieces[0].extra"),
        (
            lambda members: members["shapes"].update(other=[-1]),
            "shapes.other must be a list of numbers, each a whole number from 0 to 2^63 - 1, not [-1]",
        ),
        (
            lambda members: members["topology"].update(world_size="two"),
            'topology.world_size must be a whole number from 0 to 2^63 - 1, not "two"',
        ),
        (lambda members: members.update(flags=[]), "flags must be an object, not []"),
        (lambda members: members.update(flags={"optimizer": "x"}), 'flags.optimizer must be an object, not "x"'),
        (lambda members: members["run"].update(readings=[]), "run.readings must be a list of readings that begin at sample 0"),
        (lambda members: read(members, first_sample=1), "run.readings must be a list of readings that begin at sample 0"),
        (lambda members: read(members, seq_length=0), "run.readings[0].seq_length must be a whole number from 1 to 2^63 - 1, not 0"),
        (lambda members: read(members, splits={"training": []}), "has the unknown key run.readings[0].splits.training"),
        (lambda members: read(members, splits={"train": [{}]}), "lacks run.readings[0].splits.train[0].share"),
        (lambda members: read(members, splits={"train": [ORDER | {"share": "all"}]}), "train[0].share must be a finite number"),
        (
            lambda members: read(members, splits={"train": [ORDER | {"token_count": 0}]}),
            "train[0].token_count must be a whole number from 1",
        ),
        (lambda members: read(members, splits={"train": [ORDER | {"stop_document": 9}]}), "stop_document must be at least first_document"),
        (lambda members: (read(members), members.update(consumed_samples=6)), "run.consumed_tokens must be 192, the tokens in the samples"),
        (
            lambda members: (read(members), members["run"].update(scheduled_tokens=32 * members["consumed_samples"] + 1)),
            "run.scheduled_tokens must be at most the",
        ),
        (
            lambda members: (read(members), members["run"]["readings"].append({**READING, "first_sample": 2**40})),
            "run.readings must be readings that begin before sample",
        ),
        (lambda members: members.pop("shapes"), "shapes"),
        (lambda members: members.update(unknown=1), "unknown"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_damaged(folder: Path, change: Callable[[dict[str, Any]], object], finding: str) -> None:
    rewrite(folder, change)
    with pytest.raises(DamagedCheckpointError, match="is damaged") as error:
        read_manifest(folder)
    assert finding in str(error.value)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_as_before_once_a_manifest_is_read_or_refused(folder: Path, collects: bool) -> None:
    try:
        (gc.enable if collects else gc.disable)()
        read_manifest(folder)
        assert gc.isenabled() == collects
        (folder / MANIFEST_FILE).write_text("{}")
        (folder / MARKER_FILE).write_text(marker_json("{}"))
        with pytest.raises(CheckpointError):
            read_manifest(folder)
        assert gc.isenabled() == collects
    finally:
        gc.enable()


@pytest.mark.parametrize(("member", "value"), [("format", "other"), ("format_version", 1), ("format_version", 4), ("format_version", "3")])
def test_another_format_is_named_and_not_called_damaged(folder: Path, member: str, value: object) -> None:
    rewrite(folder, lambda members: members.update({member: value}))
    with pytest.raises(CheckpointError) as error:
        read_manifest(folder)
    assert not isinstance(error.value, DamagedCheckpointError)
    assert str(value) in str(error.value) or "not a manifest" in str(error.value)


@pytest.mark.parametrize("file", [MANIFEST_FILE, MARKER_FILE])
def test_a_pipe_a_link_to_a_device_and_deep_brackets_are_damage(folder: Path, file: str) -> None:
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(DamagedCheckpointError, match=f"{file} cannot be read \\(it is a pipe"):
        read_manifest(folder)
    (folder / file).unlink()
    (folder / file).symlink_to("/dev/zero")
    with pytest.raises(DamagedCheckpointError, match=f"{file} cannot be read \\(it is a device"):
        read_manifest(folder)
    (folder / file).unlink()
    text = '{"a":' * 10_000
    (folder / file).write_text(text)
    if file == MANIFEST_FILE:
        (folder / MARKER_FILE).write_text(marker_json(text))
    with pytest.raises(DamagedCheckpointError, match="nested more than 64 levels deep"):
        read_manifest(folder)


def test_flags_may_hold_any_numbers_because_those_who_use_them_check_them(folder: Path) -> None:
    rewrite(folder, lambda members: members.update(flags={"training": {"exit_interval": 10**30}}))
    assert read_manifest(folder).flags == {"training": {"exit_interval": 10**30}}


@pytest.mark.parametrize("rows", ["many", float("nan"), 0, 2**70, True, None])
def test_a_number_of_rows_that_is_none_is_refused(folder: Path, rows: object) -> None:
    rewrite(folder, lambda members: members.update(flags={"padded_vocab_size": rows}))
    with pytest.raises(CheckpointError, match="padded_vocab_size must be a whole number from 1 to 2\\^63 - 1, not "):
        padded_vocab_size(read_manifest(folder))
