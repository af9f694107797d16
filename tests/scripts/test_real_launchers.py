"""torchrun_nodes.sh as two nodes on this machine, and mpirun of Open MPI, which is skipped where it is not installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness.living_ranks import living_ranks
from harness.patience import PATIENCE_SECONDS, wait_until
from harness.places import ROOT
from harness.rank_pool import free_port
from harness.tiny_runs import TINY

pytestmark = [pytest.mark.long, pytest.mark.gloo]
FLAGS = [*TINY, "--zero-stage", "3"]
ENDLESS = ["--train-iters", "1000000"]
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "RANKS": "1"}


def node(tmp_path: Path, node_rank: int, port: int, *flags: str) -> subprocess.Popen[bytes]:
    """A node of torchrun_nodes.sh with one rank, whose words go to a file of its own."""
    place = {"NODES": "2", "NODE_RANK": str(node_rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = ["bash", "scripts/torchrun_nodes.sh", *FLAGS, "--log-jsonl", str(tmp_path / "log.jsonl"), *flags]
    with (tmp_path / f"node_{node_rank}.txt").open("wb") as said:
        return subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT | place, stdout=said, stderr=said)


def test_a_node_that_comes_late_joins_the_run(tmp_path: Path) -> None:
    port = free_port()
    first = node(tmp_path, 0, port, "--train-iters", "3")
    wait_until(lambda: is_taken(port), "the first node does not listen")
    second = node(tmp_path, 1, port, "--train-iters", "3")
    assert (first.wait(PATIENCE_SECONDS), second.wait(PATIENCE_SECONDS)) == (0, 0)
    assert "tensor-model-parallel size: 1 (2 nodes x 1 rank)" in (tmp_path / "node_0.txt").read_text()


def test_a_node_that_dies_ends_the_other(tmp_path: Path) -> None:
    port = free_port()
    first, second = (node(tmp_path, node_rank, port, *ENDLESS) for node_rank in range(2))
    wait_for_iteration(tmp_path)
    second.kill()
    assert first.wait(PATIENCE_SECONDS) == 1
    second.wait()
    wait_until(lambda: not living_ranks(tmp_path / "log.jsonl"), "a rank lives on")


def test_no_rank_outlives_a_killed_mpirun(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None or "Open MPI" not in subprocess.check_output(["mpirun", "--version"], text=True):
        pytest.skip("mpirun of Open MPI is not installed (the package openmpi-bin)")
    options = "--oversubscribe -n 2".split() + (["--allow-run-as-root"] if os.geteuid() == 0 else [])
    words = ["mpirun", *options, sys.executable, "pretrain_zeropp_gpt.py", *FLAGS, *ENDLESS, "--log-jsonl", str(tmp_path / "log.jsonl")]
    with (tmp_path / "said.txt").open("wb") as said:
        mpirun = subprocess.Popen(words, cwd=ROOT, env={**ENVIRONMENT, "MASTER_PORT": str(free_port())}, stdout=said, stderr=said)
    wait_for_iteration(tmp_path)
    assert len(living_ranks(tmp_path / "log.jsonl")) == 2
    os.kill(mpirun.pid, signal.SIGKILL)
    mpirun.wait()
    wait_until(lambda: not living_ranks(tmp_path / "log.jsonl"), "a rank lives on")


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def wait_for_iteration(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    wait_until(lambda: log.exists() and "lm_loss" in log.read_text(), "no iteration is done")
