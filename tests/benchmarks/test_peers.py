"""Tests the choice of configurations of benchmarks/two_nodes.py, and the calls of its DeepSpeed peer, with a stand-in for the package."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.places import ROOT
from torch import Tensor, nn

from benchmarks import two_nodes
from benchmarks.slow_links import deepspeed_zero3
from benchmarks.slow_links.configurations import (
    ALL,
    DEEPSPEED,
    DEEPSPEED_HPZ,
    DEEPSPEED_KEPT,
    DEEPSPEEDS,
    FSDP2,
    LEAN,
    SMOKE_MODEL,
    ZERO3,
    Workload,
)
from benchmarks.slow_links.deepspeed_zero3 import PACKAGE, DeepSpeedTraining
from benchmarks.slow_links.peers import peers_named
from benchmarks.slow_links.program import MISTAKE_EXIT_CODE
from benchmarks.slow_links.record import Record
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.parallel.launch import read_launch
from megatron_zpp.training.sharding import choose_policy
from megatron_zpp.zero.policy import ZEROPP
from testbed.rates import UNLIMITED

TINY = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --vocab-size 50"


def policy_of(name: str) -> Any:
    workload = Workload(2, 2, SMOKE_MODEL)
    return choose_policy(resolve(parse_flags(workload.flags(name)), workload.world_size, workload.ranks_per_node).zero)


def test_zeropp_is_the_set_of_the_paper() -> None:
    assert policy_of(ALL) == ZEROPP


def test_lean_sends_differences_of_a_kept_copy() -> None:
    policy = policy_of(LEAN)
    assert policy.keeps_copy and (policy.weight_codes.inter.bits, policy.gradient_codes.inter.bits) == (3, 3)


def test_by_default_fsdp2_is_the_only_peer() -> None:
    assert peers_named(two_nodes._parse([]).peers) == [FSDP2]


def test_results_with_deepspeed_have_a_file_of_their_own() -> None:
    names = [two_nodes._parse(words).output.name for words in ([], ["--peers", "deepspeed", "fsdp2"])]
    assert names == ["two_nodes_2x2", "two_nodes_2x2_deepspeed"]


@pytest.mark.parametrize("words", [[], ["--nodes", "4"], ["--gradient-accumulation", "8"], ["--peers", "deepspeed", "fsdp2"]])
def test_the_commands_of_the_page_continue_none_of_the_stored_measurements(words: list[str]) -> None:
    stem = two_nodes._parse(words).output
    assert (ROOT / "benchmarks" / "results" / stem.name).with_suffix(".json").is_file()
    assert stem.parent == ROOT / "runs"


def test_fsdp2_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="--peers deepspeed leaves out fsdp2.*add fsdp2"):
        peers_named(["deepspeed"])


@pytest.mark.parametrize("word", ["deepspeed", "deepspeed-kept", "deepspeed-hpz"])
def test_without_deepspeed_its_peer_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    monkeypatch.setattr(two_nodes, "enter_own_network", lambda words: pytest.fail("a network was made"))
    code = two_nodes.main(["--peers", "fsdp2", word, "--smoke", "--output", str(tmp_path / "smoke")])
    assert code == MISTAKE_EXIT_CODE
    assert "--peers deepspeed needs the package deepspeed, which is not installed" in capsys.readouterr().err


def test_rounds_of_other_configurations_are_not_continued(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {}, starts_anew=True)
    record.add_round(UNLIMITED, {FSDP2: {}, ZERO3: {}})
    record.check_configurations([ZERO3, FSDP2])
    with pytest.raises(ValueError, match="holds rounds of FSDP2, ZeRO-3, and .*lean are to be measured.*--fresh"):
        record.check_configurations([FSDP2, ZERO3, LEAN])


LAUNCH = read_launch({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})


def zero_keys_of(name: str) -> dict[str, Any]:
    workload = Workload(2, 2, TINY)
    config = resolve(parse_flags(workload.flags(name)), workload.world_size, workload.ranks_per_node)
    keys: dict[str, Any] = deepspeed_zero3.settings(name, config, LAUNCH, 1000)["zero_optimization"]
    return keys


KEYS = {name: zero_keys_of(name) for name in DEEPSPEEDS}


def test_deepspeed_releases_weights_after_forward_unless_they_are_to_be_kept() -> None:
    limits = {name: (keys.get("stage3_max_live_parameters"), keys.get("stage3_max_reuse_distance")) for name, keys in KEYS.items()}
    assert limits == {DEEPSPEED: (2000, 0), DEEPSPEED_HPZ: (2000, 0), DEEPSPEED_KEPT: (None, None)}


def test_the_secondary_copies_of_deepspeed_are_those_of_a_node() -> None:
    assert [keys.get("zero_hpz_partition_size") for keys in KEYS.values()] == [None, None, 2]


@dataclass
class StandInEngine:
    """What DeepSpeed's engine is to its caller, in one process: fp32, gradients divided by the number of micro-batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: dict[str, Any]
    calls: list[str] = field(default_factory=list)

    def __call__(self, *batch: Tensor, **options: Any) -> Tensor:
        losses: Tensor = self.model(*batch, **options)
        return losses

    def train(self) -> None:
        self.model.train()

    def backward(self, loss: Tensor) -> None:
        self.calls.append("backward")
        (loss / self.config["gradient_accumulation_steps"]).backward()

    def step(self) -> None:
        self.calls.append("step")
        if self.calls.count("step") % self.config["gradient_accumulation_steps"] == 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config["gradient_clipping"])
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[StandInEngine]:
    """The engines that the stand-in for DeepSpeed has made."""
    engines: list[StandInEngine] = []

    def initialize(*, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], dist_init_required: None) -> Any:
        engines.append(StandInEngine(model, optimizer, config))
        return engines[-1], optimizer, None, None

    module = types.ModuleType(PACKAGE)
    module.__spec__ = importlib.machinery.ModuleSpec(PACKAGE, None)
    module.initialize = initialize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PACKAGE, module)
    monkeypatch.setattr(dist, "all_reduce", lambda total: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    return engines


def test_the_deepspeed_peer_makes_a_step_of_all_its_micro_batches(stand_in: list[StandInEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "")
    deepspeed_zero3.check_installed()
    workload = Workload(1, 1, TINY, micro_batch_size=2, microbatches=3)
    world = types.SimpleNamespace(device=torch.device("cpu"))
    launch = read_launch(
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    )
    training = DeepSpeedTraining(DEEPSPEED, workload.flags(DEEPSPEED), launch, world)  # type: ignore[arg-type]
    losses = [training.step() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    engine = stand_in[0]
    assert engine.calls == ["backward", "step"] * 9
    assert engine.config["zero_optimization"]["stage"] == 3 and engine.config["bf16"]["enabled"]
    assert engine.config["zero_optimization"]["reduce_bucket_size"] == sum(weight.numel() for weight in engine.model.blocks[0].parameters())
    assert [group["weight_decay"] > 0 for group in engine.optimizer.param_groups] == [True, False]
