"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd in a folder of their own, on free ports."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from harness.patience import PATIENCE_SECONDS, wait_until
from harness.places import ROOT
from harness.rank_pool import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
REAL_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
# The first node has the name of this machine, so that ranks find it by Slurm's variables alone. zz: it is the second in every list.
NODES = (socket.gethostname().split(".")[0], "zz-second-node")
CORES = 4  # of each node, as Slurm counts them
GRACE_SECONDS = 60  # of a preempted job, until Slurm ends it by force
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
SETTINGS = """
ClusterName={cluster}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
PlugStackConfig={folder}/plugstack.conf
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1,defer
KillWait=5
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace} MaxTime=INFINITE State=UP
PartitionName=graceless Nodes=ALL PriorityTier=1 GraceTime=0 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} RealMemory=1000 State=UNKNOWN\n"


class NoSlurm(Exception):
    """Why this machine can run no Slurm."""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm. environment: of every command."""

    folder: Path
    environment: dict[str, str]

    def command(self, *words: str | Path, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command of Slurm, run to its end."""
        environment = {**self.environment, **variables}
        return subprocess.run(
            [str(word) for word in words], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )

    def said(self, *words: str | Path, folder: Path = ROOT, **variables: str) -> str:
        """What a command of Slurm that succeeds prints."""
        done = self.command(*words, folder=folder, **variables)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout.strip()

    def submit(self, *words: str | Path, folder: Path = ROOT, **variables: str) -> Job:
        """The job that sbatch makes of these words, submitted in `folder`."""
        log = self.folder / "job_%j.log"
        return Job(self, self.said("sbatch", "--parsable", "--output", log, *words, folder=folder, **variables))

    def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        """Waits until `is_so` is true. Raises RuntimeError with the state of the queue if that takes too long."""
        try:
            wait_until(is_so, f"{what}: not within {PATIENCE_SECONDS:.0f} s", pause_seconds=0.1)
        except TimeoutError as error:
            raise RuntimeError(f"{error}\n{self.command('squeue', '--long').stdout}") from error


@dataclass(frozen=True)
class Job:
    """A job in the queue."""

    slurm: Slurm
    number: str

    @property
    def log(self) -> str:
        path = self.slurm.folder / f"job_{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def facts(self) -> dict[str, str]:
        """What Slurm says about the job: JobState, ExitCode, Restarts and others."""
        words = self.slurm.said("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self) -> str:
        return self.facts()["JobState"]

    def has_ended(self) -> bool:
        return self.state() in ENDED

    def is_running(self) -> bool:
        """Whether the job runs. Slurm lets a requeued job wait for two minutes; this one is told to start after some seconds.

        Not at once: slurmd refuses credentials from the second in which it ended the job.
        """
        facts = self.facts()
        is_held_back = facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime"
        if is_held_back and datetime.fromisoformat(facts["EligibleTime"]) > datetime.now() + timedelta(seconds=10):
            self.slurm.command("scontrol", "update", f"JobId={self.number}", "StartTime=now+3")
        return facts["JobState"] == "RUNNING"

    def outcome(self) -> tuple[str, str]:
        """State and exit code of the job, once it has ended."""
        self.slurm.wait_for(f"the end of job {self.number}", lambda: not self.is_running() and self.has_ended())
        facts = self.facts()
        return facts["JobState"], facts["ExitCode"]

    def ranks(self) -> list[int]:
        """Process ids of this job's ranks, rather than of the srun and the torchrun that start them."""
        return [pid for pid in self.processes("python") if b"pretrain_zeropp_gpt.py" in _words(pid)[1:4]]

    def processes(self, name: str) -> list[int]:
        """Ids of the processes that run this program in the job."""
        mark = f"SLURM_JOB_ID={self.number}".encode()
        return [pid for pid in _processes() if name.encode() in _words(pid)[0] and mark in _variables(pid)]

    def step_daemons(self) -> list[int]:
        """Process ids of the slurmstepd of the first step, one of each node."""
        title = f"slurmstepd: [{self.number}.0]".encode()
        mark = f"SLURM_CONF={self.slurm.folder / 'slurm.conf'}".encode()
        return [pid for pid in _processes() if _words(pid)[0].startswith(title) and mark in _variables(pid)]

    def cancel(self) -> None:
        self.slurm.command("scancel", self.number)


@contextmanager
def real_slurm(folder: Path) -> Iterator[Slurm]:
    """A Slurm that runs until the end of the block. Raises NoSlurm where there can be none."""
    missing = [name for name in (*DAEMONS, *COMMANDS) if shutil.which(name, path=REAL_PATH) is None]
    if missing:
        raise NoSlurm(f"{' and '.join(missing)} not installed (the packages slurm-wlm and munge)")
    if os.geteuid() != 0:
        raise NoSlurm("slurmd needs root")
    _write_settings(folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "MUNGE"))}
    environment |= {"PATH": f"{environment['PATH']}:{REAL_PATH}", "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    slurm = Slurm(folder, environment)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_daemon(slurm, *_munged(folder)))
        slurm.wait_for("munged", (folder / "munge.socket").exists)
        daemons.append(_daemon(slurm, "slurmctld", "-D", "-i", "-f", folder / "slurm.conf"))
        slurm.wait_for("slurmctld", lambda: slurm.command("scontrol", "ping").returncode == 0)
        daemons.extend(_daemon(slurm, "slurmd", "-D", "-N", name, "-f", folder / "slurm.conf") for name in NODES)
        slurm.wait_for("both slurmd", lambda: slurm.said("sinfo", "-h", "-N", "-p", "low", "-o", "%t") == "idle\nidle")
        yield slurm
        slurm.command("scancel", "--user", getpass.getuser())
        slurm.wait_for("the end of all jobs", lambda: slurm.said("squeue", "-h") == "")
    finally:
        for daemon in reversed(daemons):
            _stop(daemon)
        _kill_what_is_left(folder)


def _write_settings(folder: Path) -> None:
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "plugstack.conf").touch()
    settings = SETTINGS.format(
        cluster=f"test{os.getpid()}", controller_port=free_port(), user=getpass.getuser(), folder=folder, grace=GRACE_SECONDS
    )
    nodes = [NODE.format(name=name, host=NODES[0], port=free_port(), cores=CORES) for name in NODES]
    (folder / "slurm.conf").write_text(settings + "".join(nodes))


def _munged(folder: Path) -> list[str | Path]:
    files = {
        "socket": "munge.socket",
        "key-file": "munge.key",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "munge.seed",
    }
    return ["munged", "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items())]


def _daemon(slurm: Slurm, *words: str | Path) -> subprocess.Popen[bytes]:
    log = (slurm.folder / "daemons.log").open("ab")
    return subprocess.Popen(
        [str(word) for word in words],
        env=slurm.environment,
        stdout=log,
        stderr=log,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: none outlives the tests
    )


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _variables(pid: int) -> list[bytes]:
    """The environment that a living process was started with."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _words(pid: int) -> list[bytes]:
    """The command line of a living process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def _kill_what_is_left(folder: Path) -> None:
    """Kills every process that this Slurm has started, such as an srun that waits for a slurmstepd that was killed."""
    mark = f"SLURM_CONF={folder / 'slurm.conf'}".encode()
    for pid in _processes():
        if mark in _variables(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
