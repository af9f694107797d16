from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.parallel.initialize import StartupError, World
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training import startup_checks
from megatron_zpp.training.memory_check import AvailableMemory


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_available_memory_is_the_least_of_all_ranks_and_of_a_gpu_what_is_left_after_the_start(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_checks, "bytes_for_rank", lambda device, ranks: {"cpu": 70, "cuda": 50}[device.type] // ranks)
    world: Any = SimpleNamespace(rank=1, device=torch.device(device), gather_texts=lambda own: [json.dumps([40, None]), own])
    of_device = min(40, {"cpu": 35, "cuda": 25}[device])
    assert startup_checks.available_memory(world, ["a", "a", "b"]) == AvailableMemory(of_device, 35, is_after_start=device == "cuda")


@pytest.mark.parametrize(
    ("missing", "more", "words"),
    [
        ([], {"versions": "zpp 1"}, "different versions: megatron_zpp .* with torch .* on rank 0 and zpp 1 on rank 1; install"),
        (["versions"], {"lr": 7}, "different versions: megatron_zpp .* with torch .* on rank 0 and unknown on rank 1; install"),
        (["lr"], {}, "different flags: --lr None on rank 0 and unknown on rank 1; give"),
        ([], {"load": "given"}, "different flags: --load not given on rank 0 and given on rank 1; give"),
        ([], {"tensorboard_dir": "given"}, "different flags: --tensorboard-dir not given on rank 0 and given on rank 1; give"),
        ([], {"new_flag": 3}, "different flags: --new-flag unknown on rank 0 and 3 on rank 1; give"),
    ],
    ids=["another version", "no version", "a flag less", "a folder on one rank alone", "points on one rank alone", "a flag more"],
)
def test_a_rank_of_another_version_or_with_other_flags_is_named_on_every_rank(missing: list[str], more: dict[str, Any], words: str) -> None:
    def gathered(own: str) -> list[str]:
        other = {name: value for name, value in json.loads(own).items() if name not in missing}
        return [own, json.dumps(other | more)]

    with pytest.raises(StartupError, match=words):
        startup_checks.check_same_flags(Config(), cast(World, SimpleNamespace(gather_texts=gathered)))


def test_ranks_may_spell_paths_otherwise() -> None:
    def gathered(own: str) -> list[str]:
        told = json.loads(own)
        assert "/on/this/machine" not in own
        assert {name for name, value in told.items() if value == "given"} == {"save", "tensorboard_dir"}  # --profile-dir follows from it
        return [own, own]

    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --train-iters 1 --mock-data --save-interval 1"
    config = resolve(parse_flags(f"{model} --save /on/this/machine --tensorboard-dir /on/this/machine".split()), 1, 1)
    startup_checks.check_same_flags(config, cast(World, SimpleNamespace(gather_texts=gathered)))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device); free space there, or choose another folder."),
        (errno.EDQUOT, "Disk quota exceeded); free space there, or choose another folder."),
        (errno.EROFS, "Read-only file system); choose a folder that every rank can write to."),
    ],
    ids=["disk", "quota", "read-only"],
)
def test_a_folder_in_which_no_file_can_be_made_is_refused_with_a_remedy_that_helps(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(startup_checks, "create_new", fail)
    with pytest.raises(UserError, match=f"^--save {tmp_path} cannot be written to .{words.replace(')', '.')}$"):
        startup_checks.check_writable("--save", tmp_path, rank=1)


@pytest.mark.parametrize("own", ["cpu", "cuda"])
def test_ranks_that_find_no_gpu_where_others_do_are_named_with_their_hosts(own: str) -> None:
    world = cast(World, SimpleNamespace(device=torch.device(own), gather_texts=lambda kind: [kind, "cuda", "cpu", "cpu"]))
    lacking = {"cpu": "ranks 0, 2, 3 on a, b", "cuda": "ranks 2, 3 on b"}[own]
    with pytest.raises(StartupError, match=f"no GPU is found by {lacking}, and the other ranks have GPUs; .*--distributed-backend gloo"):
        startup_checks.check_same_devices(world, ["a", "a", "b", "b"])


@pytest.mark.parametrize("own", ["cpu", "cuda"])
def test_ranks_of_one_kind_of_device_may_start(own: str) -> None:
    world = cast(World, SimpleNamespace(device=torch.device(own), gather_texts=lambda kind: [kind] * 4))
    startup_checks.check_same_devices(world, ["a", "a", "b", "b"])


@pytest.mark.parametrize(
    ("files", "backend", "visible", "device", "is_warned"),
    [
        (["nvidia0", "nvidiactl"], None, None, "cpu", True),
        (["nvidia0"], None, "0", "cpu", True),
        (["nvidia0"], "gloo", None, "cpu", False),
        (["nvidia0"], None, "", "cpu", False),
        (["nvidiactl"], None, None, "cpu", False),
        (["nvidia0"], None, None, "cuda", False),
    ],
)
def test_a_run_on_cpus_beside_gpus_warns_unless_it_was_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    backend: str | None,
    visible: str | None,
    device: str,
    is_warned: bool,
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    line = startup_checks.about_unused_gpus(Config().with_values(distributed_backend=backend), torch.device(device), tmp_path)
    assert ("WARNING: the run is on CPUs although this machine has GPUs" in line) == bool(line) == is_warned


@pytest.mark.parametrize(
    ("value", "device", "is_warned"), [("1", "cuda", True), ("8", "cuda", False), (None, "cuda", False), ("1", "cpu", False)]
)
def test_a_run_on_gpus_whose_streams_share_one_queue_is_warned(
    monkeypatch: pytest.MonkeyPatch, value: str | None, device: str, is_warned: bool
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    line = startup_checks.about_one_queue(torch.device(device))
    assert ("unset it" in line) == bool(line) == is_warned


@pytest.mark.parametrize(
    ("processor", "flag", "device", "is_warned"),
    [
        ("flags: sse2 avx512f avx512_vnni", "bf16", "cpu", True),
        ("flags: sse2 avx512f avx512_bf16", "bf16", "cpu", False),
        ("flags: sse2 amx_bf16 amx_tile", "bf16", "cpu", False),
        ("flags: sse2 avx2 avx_ne_convert", "bf16", "cpu", False),
        ("Features: asimd", "bf16", "cpu", False),  # not known of other processors
        (None, "bf16", "cpu", False),
        ("flags: sse2 avx512f", "fp16", "cpu", False),
        ("flags: sse2 avx512f", "bf16", "cuda", False),
    ],
)
def test_a_run_in_bf16_on_a_processor_without_instructions_for_it_is_warned(
    tmp_path: Path, processor: str | None, flag: str, device: str, is_warned: bool
) -> None:
    if processor is not None:
        (tmp_path / "cpuinfo").write_text(processor)
    line = startup_checks.about_slow_bf16(Config().with_values(**{flag: True}), torch.device(device), tmp_path / "cpuinfo")
    assert ("leave --bf16 out" in line) == bool(line) == is_warned


def test_all_warnings_about_the_device_are_lines_of_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("about_unused_gpus", "about_one_queue", "about_slow_bf16")):
        monkeypatch.setattr(startup_checks, name, lambda *_, line=f"line {number}" * (number != 1): line)
    assert startup_checks.about_device(Config(), torch.device("cpu")) == "line 0\nline 2"
