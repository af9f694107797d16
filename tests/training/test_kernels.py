"""Ranks without the kernels of quantization and dropout, with stand-ins for the other ranks and for GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.ops import extension
from megatron_zpp.parallel.initialize import StartupError, World
from megatron_zpp.training.kernels import lacking_ranks, prepare_kernels

HOSTS = ["a", "a", "b", "b"]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
COMMAND = extension.build_command(Path(sys.prefix))
MISSING = f"Quantization and dropout run on the plain-torch reference, because nothing is built. This builds the kernels: {COMMAND}"


def config_of(flags: str = "--zero-quantized-weights") -> Config:
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --zero-stage 3"
    return resolve(parse_flags(f"{shape} {flags}".split()), 4, 2)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(extension.REFERENCE_VARIABLE, raising=False)
    monkeypatch.setattr(extension, "load", lambda: True)
    monkeypatch.setattr(extension, "_refusal", "")
    monkeypatch.setattr(extension, "_no_code", "")


def stand_in(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, *, own: bool, others: list[bool], asked: list[bool] | None = None
) -> World:
    """The world of rank 0, this one; own, others: whether it and the other ranks have kernels. asked: the ranks that want the reference.

    Ranks without kernels report the same as this one if it lacks them too.
    """
    wants = asked or [False] * 4
    monkeypatch.setattr(extension, "has_kernels_for", lambda device_type: own)
    monkeypatch.setattr(extension, "wants_reference", lambda environment: wants[0])
    answers = [["" if has_kernels else MISSING for has_kernels in others], ["" if wanted else "unasked" for wanted in wants[1:]]]

    def gather_texts(text: str) -> list[str]:
        return [text, *((answer and text) or answer for answer in answers.pop(0))]

    return cast(World, SimpleNamespace(device=device, gather_texts=gather_texts))


def test_a_world_of_gpus_refuses_ranks_without_kernels_and_names_them_their_host_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    world = stand_in(monkeypatch, CUDA, own=True, others=[True, False, False])
    with pytest.raises(StartupError) as error:
        prepare_kernels(config_of(), world, HOSTS)
    text = str(error.value)
    assert f"ranks 2, 3 on b: {MISSING}. Run that command where these ranks run, or set {extension.REFERENCE_VARIABLE}=1 on" in text
    assert " on a" not in text


def test_a_world_of_gpus_that_built_nothing_is_refused_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    world = stand_in(monkeypatch, CUDA, own=False, others=[False] * 3)
    with pytest.raises(StartupError, match="ranks 0, 1 on a: .*; ranks 2, 3 on b: "):
        prepare_kernels(config_of(), world, HOSTS)


def test_a_world_of_gpus_that_built_nothing_trains_if_only_hidden_dropout_needs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    world = stand_in(monkeypatch, CUDA, own=False, others=[False] * 3)
    assert prepare_kernels(config_of("--hidden-dropout 0.1"), world, HOSTS) == f"WARNING: {extension.report('cuda')}"
    world = stand_in(monkeypatch, CUDA, own=False, others=[False, True, True])
    with pytest.raises(StartupError, match="them; ranks 0, 1 on a: "):
        prepare_kernels(config_of("--hidden-dropout 0.1"), world, HOSTS)


def test_a_world_of_gpus_that_was_told_to_run_on_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    world = stand_in(monkeypatch, CUDA, own=False, others=[False] * 3, asked=[True] * 4)
    assert prepare_kernels(config_of(), world, HOSTS).startswith("Quantization and dropout run on the plain-torch reference, because")


def test_of_gpus_of_which_some_were_told_the_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = stand_in(monkeypatch, CUDA, own=False, others=[False] * 3, asked=[True, True, True, False])
    with pytest.raises(StartupError, match="them; rank 3 on b: "):
        prepare_kernels(config_of(), world, HOSTS)


@pytest.mark.parametrize("own", [True, False])
def test_cpu_ranks_of_which_some_have_kernels_train_and_a_line_names_the_others(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = stand_in(monkeypatch, CPU, own=own, others=[own, False, False] if own else [False, True, True])
    line = prepare_kernels(config_of(), world, HOSTS)
    assert line.startswith("WARNING: every rank waits for ranks without kernels of quantization and dropout; ")
    assert f"{'ranks 2, 3 on b' if own else 'ranks 0, 1 on a'}: Quantization and dropout run on" in line


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_where_all_ranks_have_kernels_the_line_is_that_of_one(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    world = stand_in(monkeypatch, device, own=True, others=[True] * 3)
    assert prepare_kernels(config_of(), world, HOSTS) == extension.report(device.type)


def test_a_cpu_world_without_kernels_is_warned_in_one_line_unless_it_was_told_to_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    world = stand_in(monkeypatch, CPU, own=False, others=[False] * 3)
    assert prepare_kernels(config_of(), world, HOSTS) == f"WARNING: {extension.report('cpu')}"
    world = stand_in(monkeypatch, CPU, own=False, others=[False] * 3, asked=[True] * 4)
    assert prepare_kernels(config_of(), world, HOSTS) == extension.report("cpu")


@pytest.mark.parametrize("flags", ["--hidden-dropout 0", "--hidden-dropout 0 --attention-dropout 0.1"])
def test_a_run_that_neither_quantizes_nor_drops_hidden_values_asks_nobody(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = cast(World, SimpleNamespace(device=CUDA))  # which cannot be asked
    assert prepare_kernels(config_of(flags), world, HOSTS) == ""


@pytest.mark.parametrize("flags", ["--hidden-dropout 0.1 --attention-dropout 0", "--hidden-dropout 0 --zero-quantized-gradients"])
def test_kernels_are_loaded_and_named_if_hidden_dropout_or_gradients_need_them(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = stand_in(monkeypatch, CPU, own=True, others=[True] * 3)
    assert prepare_kernels(config_of(flags), world, HOSTS).startswith("Quantization and dropout run on the ")


def test_ranks_are_grouped_by_host_and_reason() -> None:
    assert lacking_ranks(["x.", "", "x.", "y"], ["a", "a", "b", "b"]) == "rank 0 on a: x; rank 2 on b: x; rank 3 on b: y"
