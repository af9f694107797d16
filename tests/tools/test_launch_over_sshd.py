"""tools/launch.py over a real sshd: a run on two hosts, and a connection that is cut. Skipped where sshd is not installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.living_ranks import living_ranks
from harness.patience import PATIENCE_SECONDS, wait_until
from harness.places import ROOT
from harness.processes import children_of
from harness.rank_pool import free_port
from harness.real_sshd import REAL_PATH, NoSshd, real_sshd
from harness.tiny_runs import TINY

pytestmark = pytest.mark.gloo
HOSTS = ("nodea", "nodeb")


@pytest.fixture(scope="module")
def folder_of_ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    try:
        with real_sshd(tmp_path_factory.mktemp("sshd"), HOSTS) as folder:
            yield folder
    except NoSshd as reason:
        pytest.skip(str(reason))


def launched(tmp_path: Path, folder_of_ssh: Path, *flags: str) -> subprocess.Popen[str]:
    """The launcher of a run with one rank on each of the hosts."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    rendezvous = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command = [sys.executable, "tools/launch.py", "--hostfile", str(hostfile), *rendezvous, "pretrain_zeropp_gpt.py", *TINY, *flags]
    environment = {"PATH": f"{folder_of_ssh}:{REAL_PATH}", "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# The next test trains over sshd too; that two hosts are one world: test_host_launcher.py.
@pytest.mark.long
def test_a_run_over_sshd_trains_as_one_world(tmp_path: Path, folder_of_ssh: Path) -> None:
    log = tmp_path / "log.jsonl"
    run = launched(tmp_path, folder_of_ssh, *f"--train-iters 3 --zero-stage 3 --log-jsonl {log}".split())
    output, errors = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 0, errors
    assert "tensor-model-parallel size: 1 (2 nodes x 1 rank)" in output
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["iteration"] for record in records if "lm_loss" in record] == [1, 2, 3]


def test_a_cut_connection_saves_a_checkpoint_under_the_signal_handler(tmp_path: Path, folder_of_ssh: Path) -> None:
    """Every ssh is killed in mid-run. sshd then ends the input of each host's bash, which sends SIGTERM to its torchrun."""
    log, latest = tmp_path / "log.jsonl", tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    flags = f"--train-iters 100000 --zero-stage 3 --exit-signal-handler --save {latest.parent} --log-jsonl {log}"
    run = launched(tmp_path, folder_of_ssh, *flags.split())
    try:
        wait_for(log)
        connections = children_of(run.pid)
        assert len(connections) == len(HOSTS)
        for connection in connections:
            os.kill(connection, signal.SIGKILL)
        _, errors = run.communicate(timeout=PATIENCE_SECONDS)
        assert run.returncode != 0 and "launch.py: node" in errors
        wait_for(latest)
    finally:
        run.kill()
        run.wait()


@pytest.mark.long
@pytest.mark.parametrize("killed", ["launcher", "ssh", "sshd"])
def test_no_rank_outlives_the_launcher_or_its_connections(tmp_path: Path, folder_of_ssh: Path, killed: str) -> None:
    """Killed without a chance to end anything: the launcher, its ssh to every host, or the sshd of every connection."""
    log = tmp_path / "log.jsonl"
    run = launched(tmp_path, folder_of_ssh, *f"--train-iters 1000000 --zero-stage 3 --log-jsonl {log}".split())
    try:
        wait_for(log)
        ranks = living_ranks(log)
        assert len(ranks) == len(HOSTS)
        server = int((folder_of_ssh.parent / "sshd.pid").read_text())
        for pid in {"launcher": [run.pid], "ssh": children_of(run.pid), "sshd": children_of(server)}[killed]:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not living_ranks(log), f"ranks {ranks} have not ended")
        run.communicate(timeout=PATIENCE_SECONDS)
        assert run.returncode == {"launcher": -signal.SIGKILL, "ssh": 128 + signal.SIGKILL, "sshd": 255}[killed]
    finally:
        run.kill()
        run.wait()


def wait_for(path: Path) -> None:
    """Waits until the file has text."""
    wait_until(lambda: path.exists() and path.stat().st_size > 0, f"{path} has not been written")
