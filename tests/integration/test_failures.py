"""A rank that fails takes the others with it, and they say why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.forked import Forked
from harness.patience import PATIENCE_SECONDS
from harness.places import HARNESS
from harness.rank_pool import free_port
from harness.tiny_runs import TINY

PROGRAM = HARNESS / "failing_rank.py"
ENTRY = Path(__file__).parents[2] / "pretrain_zeropp_gpt.py"


def environments(world_size: int) -> list[dict[str, str]]:
    """Of ranks as a launcher starts them, two to a node."""
    common = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(min(2, world_size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)} for rank in range(world_size)]


def start_ranks(world_size: int, *flags: str) -> list[subprocess.Popen[str]]:
    """The entry, each rank from the start of Python to its end."""
    return [
        subprocess.Popen(
            [sys.executable, str(ENTRY), *TINY, *flags],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for environment in environments(world_size)
    ]


def fail(*flags: str) -> list[tuple[int, str]]:
    """Exit code and errors of each of four ranks, of which rank 1 fails."""
    ranks = [Forked(PROGRAM, *TINY, *flags, environment=environment) for environment in environments(4)]
    return [(done.returncode, done.stderr) for done in (rank.finished(timeout_seconds=PATIENCE_SECONDS) for rank in ranks)]


# Once, from the start of Python to its end: the run on two hosts in tests/tools/test_host_launcher.py, whose torchruns ask for exit code 0.
@pytest.mark.long
def test_processes_of_20_finished_runs_end_with_exit_code_0() -> None:
    for _ in range(20):
        processes = start_ranks(4, "--train-iters", "2", "--zero-stage", "3", "--eval-iters", "1")
        errors = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * 4, errors


def test_a_rank_that_fails_in_mid_job_ends_all_ranks_with_its_message() -> None:
    found = fail("--train-iters", "50", "--zero-stage", "3")
    assert [code for code, _ in found] == [1, 1, 1, 1], found
    errors = [error for _, error in found]
    assert "ended, because rank 1: RuntimeError: the disk of rank 1 is on fire" in errors[1]
    assert all("ended, because rank 1: RuntimeError: the disk of rank 1 is on fire" in error for error in errors)
