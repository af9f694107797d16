"""Instruments that the flags ask for, by rank."""

from __future__ import annotations

import pytest
import torch

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.instruments import Instruments, make_instruments

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --ranks-per-node 2 "


def config_of(flags: str) -> Config:
    return resolve(parse_flags((SHAPE + flags).split()), 4, 2)


def instruments_of(flags: str, rank: int = 0) -> Instruments:
    return make_instruments(config_of(flags), torch.device("cpu"), rank)


def test_without_flags_nobody_listens() -> None:
    instruments = instruments_of("")
    assert type(instruments.observer) is Observer and not instruments.observes_hops and instruments.traces is None


@pytest.mark.parametrize(("level", "observes_hops"), [(1, False), (2, True)])
def test_hops_are_observed_for_the_timers_that_need_it(level: int, observes_hops: bool) -> None:
    instruments = instruments_of(f"--timing-log-level {level}")
    assert type(instruments.observer) is not Observer and instruments.observes_hops is observes_hops


@pytest.mark.parametrize(("flags", "ranks"), [("", [0]), ("--profile-ranks 1 3", [1, 3])])
def test_only_the_ranks_asked_for_profile(flags: str, ranks: list[int]) -> None:
    profiling = [rank for rank in range(4) if instruments_of(f"--profile --profile-dir d {flags}", rank).traces is not None]
    assert profiling == ranks
    observing = [rank for rank in range(4) if instruments_of(f"--profile --profile-dir d {flags}", rank).observes_hops]
    assert observing == ranks


def test_traces_go_where_tensorboard_looks_unless_told_otherwise() -> None:
    assert config_of("--profile --tensorboard-dir t").profiling.profile_dir == "t"
    assert config_of("--profile --tensorboard-dir t --profile-dir p").profiling.profile_dir == "p"


def test_a_snapshot_needs_the_name_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("--record-memory-history --memory-snapshot-path .")
    with pytest.raises(UserError, match=r"^--memory-snapshot-path \. names no file"):
        make_instruments(config, torch.device("cuda"), 0)


@pytest.mark.parametrize("flag", ["--nvtx-ranges", "--record-memory-history"])
def test_what_needs_a_gpu_names_itself_without_one(flag: str) -> None:
    with pytest.raises(UserError, match=f"^{flag} needs a GPU, and this run is on cpu; leave it out.$"):
        instruments_of(flag)
