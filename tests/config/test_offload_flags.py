"""The optimizer's state on the host: its flags, the keys of a DeepSpeed JSON, and what contradicts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.training.sharding import choose_policy
from megatron_zpp.zero.policy import Rung

RUN = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --train-iters 4 --lr 1e-3"
CPU = {"device": "cpu"}


def resolved(flags: str) -> Config:
    return resolve(parse_flags(f"{RUN} {flags}".split()), 4, 2)


def with_json(folder: Path, values: dict[str, Any], flags: str = "") -> Config:
    file = folder / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, **values}}))
    return resolved(f"--deepspeed_config {file} {flags}")


def message(folder: Path, values: dict[str, Any], flags: str = "") -> str:
    with pytest.raises(FlagError) as error:
        with_json(folder, values, flags)
    text = str(error.value)
    assert "\n" not in text and text[-1] in ".?"
    return text


@pytest.mark.parametrize("flag", ["--optimizer-cpu-offload", "--cpu-optimizer", "--cpu-offload"])
@pytest.mark.parametrize(
    "row", ["--zero-stage 1", "--zero-stage 2", "--zero-stage 3", "--zeropp paper", "--zeropp lean", "--zeropp lean --zero-stage 1"]
)
def test_every_spelling_puts_the_optimizer_of_every_row_on_the_host(flag: str, row: str) -> None:
    policy, plain = choose_policy(resolved(f"{row} {flag}").zero), choose_policy(resolved(row).zero)
    assert policy.optimizer is Rung.HOST and plain.optimizer is Rung.PRIMARY
    assert (policy.gradients, policy.weights_in_step, policy.weight_codes) == (plain.gradients, plain.weights_in_step, plain.weight_codes)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--zero-stage 0 --cpu-optimizer", ["--optimizer-cpu-offload", "one owner", "--zero-stage 0", "choose --zero-stage 1, 2 or 3"]),
        ("--zero-stage 2 --cpu-offload --optimizer-backend apex", ["--optimizer-backend apex", "choose --optimizer-backend torch"]),
        ("--zero-stage 3 --remote-device cpu", ["--remote-device cpu", "--optimizer-cpu-offload", "choose none"]),
        ("--zero-stage 3 --cpu-offload --optimizer-offload-fraction 0.5", ["--optimizer-offload-fraction 0.5", "all", "choose 1 or 1.0"]),
        ("--zero-stage 3 --cpu-offloading-num-layers 2", ["--cpu-offloading-num-layers 2", "--checkpoint-activations", "choose 0"]),
    ],
)
def test_what_does_not_go_with_offload_names_flag_value_and_remedy(flags: str, words: list[str]) -> None:
    with pytest.raises(FlagError) as error:
        resolved(flags)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"offload_optimizer": CPU},
        {"offload_optimizer": {**CPU, "pin_memory": True, "ratio": 1.0, "buffer_count": 4, "fast_init": False}},
        {"cpu_offload": True},
        {"cpu_offload": True, "offload_optimizer": CPU},
        {"cpu_offload": True, "cpu_offload_use_pin_memory": True},
    ],
    ids=str,
)
def test_a_json_asks_for_offload_as_a_flag_does(tmp_path: Path, values: dict[str, Any]) -> None:
    config = with_json(tmp_path, values)
    assert config.zero.optimizer_cpu_offload
    assert any("--optimizer-cpu-offload" in notice for notice in config.notices)
    assert with_json(tmp_path, values, "--cpu-optimizer").zero.optimizer_cpu_offload


@pytest.mark.parametrize(
    "values",
    [{}, {"offload_optimizer": None}, {"offload_optimizer": {}}, {"offload_optimizer": {"device": "none"}}, {"cpu_offload": False}],
    ids=str,
)
def test_a_json_that_asks_for_none_has_none(tmp_path: Path, values: dict[str, Any]) -> None:
    assert not with_json(tmp_path, values).zero.optimizer_cpu_offload


@pytest.mark.parametrize(
    "values", [{"offload_optimizer": {"device": "none"}}, {"cpu_offload": False}, {"offload_optimizer": {"pin_memory": True}}], ids=str
)
def test_a_json_without_offload_contradicts_the_flag(tmp_path: Path, values: dict[str, Any]) -> None:
    assert "--optimizer-cpu-offload contradicts zero_optimization." in message(tmp_path, values, "--cpu-offload")


@pytest.mark.parametrize(
    "values, words",
    [
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, ['offload_optimizer.device "nvme"', "never on a disk", '"cpu"']),
        ({"offload_optimizer": {"device": "gpu"}}, ['device "gpu"', "cpu or none"]),
        ({"offload_optimizer": {**CPU, "ratio": 0.5}}, ["offload_optimizer.ratio 0.5", "choose 1.0"]),
        ({"offload_optimizer": {**CPU, "ratio": True}}, ["offload_optimizer.ratio true", "choose 1.0"]),
        ({"offload_optimizer": {**CPU, "super_offload": True}}, ["super_offload true", "leave the key out"]),
        ({"offload_optimizer": {**CPU, "pinned": True}}, ["offload_optimizer.pinned", "pin_memory"]),
        ({"offload_optimizer": True}, ["offload_optimizer true", '{"device": "cpu"}']),
        ({"cpu_offload": "yes"}, ['cpu_offload "yes"', "true or false"]),
        ({"cpu_offload": False, "offload_optimizer": CPU}, ["offload_optimizer", "contradicts", "cpu_offload false"]),
        ({"offload_param": CPU}, ["offload_param", "main weights", "offload_optimizer"]),
        ({"cpu_offload_param": True}, ["cpu_offload_param", "main weights", "offload_optimizer"]),
        ({"stage": 0, "cpu_offload": True}, ["--optimizer-cpu-offload", "--zero-stage 0", "is zero_optimization.cpu_offload true"]),
        ({"offload_optimizer": "auto"}, ['offload_optimizer "auto"', "filled in by another program"]),
    ],
    ids=str,
)
def test_a_value_of_the_json_that_is_not_available_is_named_with_its_remedy(
    tmp_path: Path, values: dict[str, Any], words: list[str]
) -> None:
    text = message(tmp_path, values)
    assert all(word in text for word in words), text
