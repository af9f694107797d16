"""A rank that fails takes the others with it, and they say why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.places import HARNESS
from harness.rank_pool import free_port
from harness.tiny_runs import TINY

PROGRAM = HARNESS / "failing_rank.py"
ENTRY = Path(__file__).parents[2] / "pretrain_zeropp_gpt.py"


def start_ranks(world_size: int, program: Path, *flags: str) -> list[subprocess.Popen[str]]:
    """Processes of their own, as a launcher starts them, two to a node."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(min(2, world_size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, str(program), *TINY, *flags],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world_size)
    ]


def test_processes_of_a_finished_run_end_with_exit_code_0() -> None:
    for _ in range(3):
        processes = start_ranks(4, ENTRY, "--train-iters", "2", "--zero-stage", "3", "--eval-iters", "1")
        errors = [process.communicate(timeout=120)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0, 0], errors


def test_a_rank_that_fails_in_mid_job_ends_all_ranks_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILURE", "raise")
    processes = start_ranks(4, PROGRAM, "--train-iters", "50", "--zero-stage", "3")
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1, 1]
    assert "ended, because rank 1: RuntimeError: the disk of rank 1 is on fire" in errors[1]
    assert all("ended, because rank 1: RuntimeError: the disk of rank 1 is on fire" in error for error in errors)


def test_a_rank_that_dies_ends_the_others_with_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILURE", "kill")
    processes = start_ranks(4, PROGRAM, "--train-iters", "50", "--zero-stage", "3")
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL, 1, 1]
    assert all("no sign of life from rank 1)" in errors[rank] for rank in (0, 2, 3)), errors


@pytest.mark.long
def test_a_rank_that_stops_ends_the_others_within_the_timeout_with_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILURE", "stop")
    processes = start_ranks(4, PROGRAM, "--train-iters", "50", "--zero-stage", "3", "--distributed-timeout-minutes", "1")
    errors = {rank: processes[rank].communicate(timeout=150)[1] for rank in (0, 2, 3)}
    processes[1].kill()
    assert all(processes[rank].returncode == 1 for rank in errors)
    assert all("no sign of life from rank 1)" in error for error in errors.values()), errors
