"""The limit of open files, which is raised as far as the system lets a process."""

from __future__ import annotations

import resource

import pytest
from harness.tiny_runs import TINY

import pretrain_zeropp_gpt
from megatron_zpp.system.open_files import allow_open_files
from megatron_zpp.system.user_error import UserError

REMEDY = "allow more where the ranks start (ulimit -n)\n"


class Limits:
    """Stands in for the limits of the system. may_rise: whether it lets this process raise its own."""

    def __init__(self, soft: int, hard: int, *, may_rise: bool = True) -> None:
        self.now = (soft, hard)
        self._may_rise = may_rise

    def of_process(self, kind: int) -> tuple[int, int]:
        return self.now

    def change(self, kind: int, limits: tuple[int, int]) -> None:
        if not self._may_rise:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limits


def put(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> Limits:
    monkeypatch.setattr(resource, "getrlimit", limits.of_process)
    monkeypatch.setattr(resource, "setrlimit", limits.change)
    return limits


def test_a_process_may_open_as_many_files_as_the_system_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = put(Limits(100, 5000), monkeypatch)
    allow_open_files(world_size=1024, ranks_per_node=8, num_workers=2)
    assert limits.now == (5000, 5000)


@pytest.mark.parametrize("limits", [Limits(130, 5000, may_rise=False), Limits(resource.RLIM_INFINITY, resource.RLIM_INFINITY)])
def test_a_limit_that_cannot_be_raised_is_enough_if_it_is_as_high_as_needed(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    before = put(limits, monkeypatch).now
    allow_open_files(world_size=20, ranks_per_node=4, num_workers=2)
    assert limits.now == before


def test_a_limit_below_what_the_run_needs_is_refused_with_both_numbers_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    put(Limits(24, 90), monkeypatch)
    with pytest.raises(UserError, match=r"only 90 files open, .* may need 91; allow .* \(ulimit -n\), or give less than --num-workers 2$"):
        allow_open_files(world_size=2, ranks_per_node=1, num_workers=2)
    put(Limits(24, 91), monkeypatch)
    allow_open_files(world_size=2, ranks_per_node=1, num_workers=2)


@pytest.mark.parametrize(("ranks_per_node", "needed"), [(8, 64 + 16384 + 3 * (8 + 2048)), (1, 64 + 16384 + 3 * (1 + 16384))])
def test_every_group_of_a_link_needs_a_connection_to_each_member(ranks_per_node: int, needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put(Limits(24, needed - 1), monkeypatch)
    with pytest.raises(UserError, match=f"may need {needed}; allow"):
        allow_open_files(world_size=16384, ranks_per_node=ranks_per_node, num_workers=0)


def test_one_rank_which_connects_to_no_other_is_not_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    put(Limits(24, 64), monkeypatch)
    allow_open_files(world_size=1, ranks_per_node=1, num_workers=2)


def test_a_run_that_may_open_too_few_files_is_refused_before_ranks_connect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(Limits(8, 15), monkeypatch)
    assert pretrain_zeropp_gpt.main([*TINY, "--train-iters", "1"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("error: this process may have only 15 files open, and a run of this size may need 16; " + REMEDY)
