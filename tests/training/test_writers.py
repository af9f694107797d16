"""Writers that the flags ask for, by rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from harness.stand_in_wandb import StandIn

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.monitor.logging import RankPrinter
from megatron_zpp.parallel.initialize import World
from megatron_zpp.parallel.launch import SchedulerJob
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.instruments import make_instruments
from megatron_zpp.training.save_lock import SaveLock
from megatron_zpp.training.writers import open_writers

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --ranks-per-node 2 "
NO_LOCK = SaveLock(None, SchedulerJob(), cast(World, None))


def config_of(flags: str) -> Config:
    return resolve(parse_flags((SHAPE + flags).split()), 4, 2)


def test_weights_and_biases_gets_the_arguments_on_the_last_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", package)
    config = config_of(f"--wandb-project p --wandb-exp-name n --save {tmp_path}")
    instruments = make_instruments(config, torch.device("cpu"), 0)
    assert open_writers(config, RankPrinter(0, 4), instruments, NO_LOCK).scalars == () and package.started_with == {}
    writers = open_writers(config, RankPrinter(3, 4), instruments, NO_LOCK)
    assert package.started_with["dir"] == str(tmp_path / "wandb") and package.started_with["config"]["num_layers"] == "2"
    writers.close()
    assert package.has_finished


def test_a_folder_of_weights_and_biases_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", StandIn())
    (tmp_path / "file").touch()
    config = config_of(f"--wandb-project p --wandb-save-dir {tmp_path / 'file'}")
    with pytest.raises(UserError, match="^--wandb-save-dir .*file cannot be written to"):
        open_writers(config, RankPrinter(3, 4), make_instruments(config, torch.device("cpu"), 3), NO_LOCK)


def test_weights_and_biases_that_fails_is_switched_off_and_named_again_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", package)
    config = config_of("--wandb-project p")
    writers = open_writers(config, RankPrinter(3, 4), make_instruments(config, torch.device("cpu"), 3), NO_LOCK)

    def unreachable(values: object, step: int) -> None:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(package, "log", unreachable)
    for iteration in (1, 2):
        writers.scalars[0].attempt(lambda writer, step=iteration: writer.write({"lm loss": 1.0}, step))
    writers.close()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "--wandb-project p (Weights & Biases) failed (ConnectionResetError: reset by peer)" in told[0]
    assert "is incomplete" in told[1] and not package.has_finished
