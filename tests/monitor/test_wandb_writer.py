"""Scalars for Weights & Biases, with a fake of its package."""

import sys

import pytest
from harness.stand_in_wandb import StandIn

from megatron_zpp.monitor.wandb_writer import WandbRun, WandbWriter
from megatron_zpp.system.user_error import UserError


def test_a_run_is_started_fed_and_finished(tmp_path, monkeypatch):
    package = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", package)
    writer = WandbWriter(WandbRun("project", "owner", "name", tmp_path / "kept"), {"num_layers": "2"})
    writer.write({"lm loss": 3.0}, 5, 40)
    writer.write({"throughput": 1.5}, 5)
    writer.close()
    folder = str(tmp_path / "kept")
    assert package.started_with == {
        "project": "project",
        "entity": "owner",
        "name": "name",
        "dir": folder,
        "config": {"num_layers": "2"},
    }
    assert package.logged == [(5, {"lm loss": 3.0, "samples vs steps": 40}), (5, {"throughput": 1.5})]
    assert package.has_finished and (tmp_path / "kept").is_dir()


def test_missing_package_names_flag_and_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="^--wandb-project project needs the package wandb.*pip install wandb"):
        WandbWriter(WandbRun("project", None, None, None), {})
