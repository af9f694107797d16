"""A rank that fails takes the others with it, and they say why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from distributed import free_port

from runs import TINY

PROGRAM = Path(__file__).with_name("failing_rank.py")


def test_a_rank_that_fails_in_mid_job_ends_all_ranks_with_its_message() -> None:
    common = {
        **os.environ,
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(PROGRAM), *TINY, "--train-iters", "50", "--zero-stage", "3"]
    processes = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(4)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1, 1]
    assert "ended, because rank 1: RuntimeError: the disk of rank 1 is on fire" in errors[1]
    assert all("ended, because rank 1: RuntimeError: the disk of rank 1 is on fire" in error for error in errors)
