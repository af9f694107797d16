"""Reasons to end a run before its last iteration."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.places import ROOT

from megatron_zpp.config.schema import TrainingConfig
from megatron_zpp.system import interrupts, process_start
from megatron_zpp.system.interrupts import SAME_PRESS_SECONDS, Interrupts
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.stop_conditions import StopConditions, StopRequest, check_kill_switch, reason_for_stopping, signals_to_handle


def test_without_the_handler_no_signal_is_touched() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop_conditions = StopConditions(TrainingConfig())
    assert signal.getsignal(signal.SIGTERM) == before and stop_conditions.request() == StopRequest.NONE
    stop_conditions.close()


def test_the_time_counts_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    training = TrainingConfig(exit_duration_in_mins=3)
    for minutes_ago, request in ((2.9, StopRequest.NONE), (3.0, StopRequest.DURATION)):
        monkeypatch.setattr(process_start, "MONOTONIC_SECONDS", time.monotonic() - 60 * minutes_ago)
        assert StopConditions(training).request() == request


def test_the_entry_notes_its_start_before_it_imports_torch() -> None:
    program = "import sys, pretrain_zeropp_gpt; print(*({'torch', 'megatron_zpp.system.process_start'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["megatron_zpp.system.process_start"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2", "SIGUSR1"])
def test_the_handler_takes_the_signal_of_the_flag_and_sigusr1_and_gives_them_back(name: str) -> None:
    training = TrainingConfig(exit_signal_handler=True, exit_signal=name)
    assert set(signals_to_handle(training)) == {signal.Signals[name], signal.SIGUSR1, signal.SIGINT, signal.SIGTERM}
    for number in signals_to_handle(training):
        before = signal.getsignal(number)
        stop_conditions = StopConditions(training)
        assert stop_conditions.request() == StopRequest.NONE
        signal.raise_signal(number)
        assert stop_conditions.request() == StopRequest.SIGNAL
        stop_conditions.close()
        assert signal.getsignal(number) == before


def test_a_second_ctrl_c_ends_at_once_and_the_repetitions_of_the_first_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repetition comes from the terminal or the launcher, as SIGINT or SIGTERM. Without a first SIGINT no SIGTERM is a second one."""
    now, ended = [100.0], list[int]()
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(interrupts.os, "_exit", ended.append)
    several = Interrupts()
    assert [several.is_first(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == [False, False, True]
    now[0] += SAME_PRESS_SECONDS
    assert not several.is_first(signal.SIGINT) and not several.is_first(signal.SIGTERM) and ended == []
    now[0] += 0.1
    several.is_first(signal.SIGUSR1)
    assert ended == []
    several.is_first(signal.SIGTERM)
    several.is_first(signal.SIGINT)
    assert ended == [130, 130]


def test_only_the_first_interrupt_is_raised() -> None:
    several = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        several.raise_first(signal.SIGINT, None)
    several.raise_first(signal.SIGINT, None)


def test_a_run_that_has_ended_is_not_interrupted() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        StopConditions(TrainingConfig()).ignore_signals()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_after_the_run_the_signals_are_ignored_for_good() -> None:
    interrupted = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    before = signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGUSR1)
    stop_conditions = StopConditions(TrainingConfig(exit_signal_handler=True, exit_signal="SIGUSR2"))
    try:
        stop_conditions.ignore_signals()
        stop_conditions.close()
        assert signal.getsignal(signal.SIGUSR2) == signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before[0])
        signal.signal(signal.SIGUSR1, before[1])
        signal.signal(signal.SIGINT, interrupted[0])
        signal.signal(signal.SIGTERM, interrupted[1])


@pytest.mark.parametrize(
    "requests, iteration, reason",
    [
        (StopRequest.NONE, 7, None),
        (StopRequest.NONE, 10, "exiting program at iteration 10"),
        (StopRequest.SIGNAL, 7, "exiting program after receiving"),
        (StopRequest.DURATION, 7, "exiting program after 3 minutes at iteration 7"),
        (StopRequest.SIGNAL | StopRequest.DURATION, 10, "exiting program after receiving"),
        (StopRequest.KILL_SWITCH | StopRequest.DURATION, 10, "exiting program because stop is there at iteration 10"),
    ],
)
def test_the_reason_names_what_ended_the_run(requests: StopRequest, iteration: int, reason: str | None) -> None:
    training = TrainingConfig(exit_interval=5, exit_signal_handler=True, exit_duration_in_mins=3, kill_switch_file="stop")
    found = reason_for_stopping(requests, iteration, training)
    assert found is reason is None or (found is not None and reason is not None and found.startswith(reason))


def test_the_requests_of_all_ranks_are_one() -> None:
    assert StopRequest.of_ranks([0.0, 1.0, 3.0]) == StopRequest.SIGNAL | StopRequest.DURATION
    assert StopRequest.of_ranks([0.0, 0.0]) == StopRequest.NONE


def test_rank_0_alone_looks_for_the_kill_switch_and_refuses_to_start_with_it(tmp_path: Path) -> None:
    training = TrainingConfig(kill_switch_file=str(tmp_path / "stop"))
    check_kill_switch(training, rank=0)
    stop_conditions = [StopConditions(training, rank) for rank in range(2)]
    assert [one.request() for one in stop_conditions] == [StopRequest.NONE, StopRequest.NONE]
    (tmp_path / "stop").touch()
    assert [one.request() for one in stop_conditions] == [StopRequest.KILL_SWITCH, StopRequest.NONE]
    check_kill_switch(training, rank=1)
    with pytest.raises(UserError, match="--kill-switch-file .*stop is there, so nothing is trained; remove the file"):
        check_kill_switch(training, rank=0)
