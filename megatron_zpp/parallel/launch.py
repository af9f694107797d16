"""Reads this process's rank, the world size and the address of rank 0 from the environment of its launcher (no torch)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_zpp.config.flag import FlagError, whole_number
from megatron_zpp.parallel.job_ids import JobIds, read_job_ids
from megatron_zpp.system.user_error import UserError

DEFAULT_PORT = 29500
LARGEST_PORT = 65535
# Ports of Slurm jobs: below the ephemeral ports of Linux, which begin at 32768, and chosen by job number, so that two jobs on one node
# seldom have the same.
FIRST_SLURM_PORT, SLURM_PORTS = 15000, 15000
# Step numbers from here on are Slurm's own: the batch script, an interactive shell.
FIRST_RESERVED_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process; local_world_size and master_address are None if it does not say.

    torchrun_holds_store: whether torchrun's agent listens at the address; else rank 0 has to.
    job: tells this job from others; two processes with the same place in their worlds have equal launches.
    unequal_nodes: what the launcher says about nodes with different numbers of ranks; empty without such nodes.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    master_address: str | None = None
    master_port: int = DEFAULT_PORT
    torchrun_holds_store: bool = False
    job: JobIds = field(default=JobIds(), compare=False)
    unequal_nodes: str = ""

    def check_equal_nodes(self, ranks_per_node: int | None) -> None:
        """Raises FlagError if the launcher has started different numbers of ranks on nodes, unless --ranks-per-node is given."""
        if self.unequal_nodes and ranks_per_node is None:
            raise FlagError(
                f"{self.unequal_nodes}, but all nodes must have the same number; start as many on each (srun --ntasks-per-node), or give "
                "--ranks-per-node: how many consecutive ranks share a host."
            )


@dataclass(frozen=True)
class SchedulerJob:
    """The scheduler's id of this job, empty without one, and how often the scheduler has started it again."""

    name: str = ""
    restarts: int = 0


@dataclass(frozen=True)
class _Launcher:
    """A kind of launcher by name, and the variables that it sets. Of local_world_sizes the first that is set counts; there may be none."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_sizes: tuple[str, ...] = ()

    def has_started(self, environment: Mapping[str, str]) -> bool:
        """Whether one of the variables that no other launcher sets is there: several set PMI_RANK."""
        return self.local_rank in environment or (self.rank != "PMI_RANK" and self.rank in environment)

    def is_complete(self, environment: Mapping[str, str]) -> bool:
        return all(name in environment for name in (self.rank, self.world_size, self.local_rank))


# LOCAL_SIZE is DeepSpeed's
TORCHRUN = _Launcher("RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
# Variables of a step override those of the job: srun may have other options than sbatch.
JOB = _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"))
STEP = replace(JOB, world_size="SLURM_STEP_NUM_TASKS")
# They may run inside a job of Slurm, so they go before it. The first counts whose variables are all there.
LAUNCHERS = (
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    _Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", ("JSM_NAMESPACE_LOCAL_SIZE",)),
    _Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    _Launcher("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    _Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
    _Launcher("HPE PALS", "PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", ("PALS_LOCAL_SIZE",)),
)
# Variables of tasks whose launcher says too little here, with the variable of the number of tasks or nodes if there is one.
INCOMPLETE = (
    ("PMI_RANK", "PMI_SIZE"),
    ("PMI_ID", "PMI_SIZE"),
    ("PMIX_RANK", ""),
    ("PALS_RANKID", ""),
    ("ALPS_APP_PE", ""),  # aprun
    ("MPT_LRANK", ""),  # mpiexec_mpt of HPE MPT
    ("MP_CHILD", "MP_PROCS"),  # IBM's poe
    ("PET_NODE_RANK", "PET_NNODES"),  # settings of torchrun, which Kubeflow gives to every pod
)


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Reads the variables of torchrun or DeepSpeed's launcher, or else of LAUNCHERS, or else of Slurm. Without any, the world has one rank.

    Raises UserError naming a variable that is missing, not a number, or contradicts another, and for a launcher that says too little.
    """
    launcher = _launcher(environment)
    if launcher is None:
        return Launch(0, 1, 0, 1, environment.get("MASTER_ADDR"), _port(environment, None))
    _check_set(environment, launcher)
    job = read_job_ids(environment, _kind(environment, launcher))
    rank, world_size, local_rank = (_number(environment, name) for name in (launcher.rank, launcher.world_size, launcher.local_rank))
    local_name = next((name for name in launcher.local_world_sizes if name in environment), "")
    counts = _tasks_of_nodes(environment, local_name) if local_name else []
    local_world_size = counts[0] if len(counts) == 1 else None
    _check_below(launcher.rank, rank, launcher.world_size, world_size)
    if local_world_size is not None:
        _check_below(launcher.local_rank, local_rank, local_name, local_world_size)
        if local_world_size > world_size:
            raise UserError(f"the launcher set {local_name}={local_world_size} and {launcher.world_size}={world_size}; correct one of them")
    _check_not_left_over(environment, launcher, world_size)
    _check_exported_world_size(environment, launcher.world_size, world_size)
    return Launch(
        rank,
        world_size,
        local_rank,
        local_world_size,
        _master_address(environment, launcher, has_one_node=1 < world_size == local_world_size),
        _port(environment, launcher),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job,
        f"{local_name}={environment[local_name]}: nodes have {' and '.join(map(str, counts))} ranks" if len(counts) > 1 else "",
    )


def read_job(environment: Mapping[str, str]) -> SchedulerJob:
    """The job of Slurm that this process belongs to."""
    job, cluster = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_CLUSTER_NAME", "")
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    name = f"{job} of {cluster}" if job and cluster else job
    return SchedulerJob(name, int(restarts) if restarts.isascii() and restarts.isdigit() else 0)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process: torchrun, DeepSpeed's, one of LAUNCHERS or srun. A shell is not one."""
    if "TORCHELASTIC_RUN_ID" in environment or _started_by(environment) is not None:
        return True
    world_size = environment.get(TORCHRUN.world_size, "")
    is_one_of_several = TORCHRUN.local_rank in environment and world_size.isdigit() and int(world_size) > 1
    return is_one_of_several or _is_slurm_task(environment)


def first_host(node_list: str) -> str:
    """The first host of a node list in Slurm's short form: node07 for `node[07-12,20],login1`."""
    outside_brackets = r"(?:[^,\[]|\[[^\]]*\])*"
    first = re.findall(outside_brackets, node_list)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _launcher(environment: Mapping[str, str]) -> _Launcher | None:
    started_by = _started_by(environment)
    # A batch script may export WORLD_SIZE alone, for the tasks that srun or another launcher starts.
    if TORCHRUN.world_size in environment and (TORCHRUN.rank in environment or not (started_by or _is_slurm_task(environment))):
        return TORCHRUN
    if started_by is not None:
        return started_by
    slurm = STEP if STEP.world_size in environment else JOB
    if slurm.rank not in environment:
        _check_incomplete(environment)
        return TORCHRUN if TORCHRUN.has_started(environment) else None
    is_task = _is_slurm_task(environment)
    # In the batch script of a job without --ntasks, SLURM_PROCID is set, but not the number of tasks.
    if (not is_task and slurm.world_size not in environment) or _number(environment, slurm.world_size) == 1:
        _check_incomplete(environment, may_be_alone=True)
        return None
    if not is_task:
        tasks = environment[slurm.world_size]
        raise UserError(
            f"this Slurm job has {slurm.world_size}={tasks}, but srun did not start this process, so it would be the only one of {tasks}; "
            f"start it with srun or torchrun, or unset {slurm.world_size} for one rank"
        )
    return slurm


def _started_by(environment: Mapping[str, str]) -> _Launcher | None:
    started = [launcher for launcher in LAUNCHERS if launcher.has_started(environment)]
    return next((launcher for launcher in started if launcher.is_complete(environment)), started[0] if started else None)


def _check_incomplete(environment: Mapping[str, str], *, may_be_alone: bool = False) -> None:
    """Refuses one task of several whose launcher says too little: each of them would be a run of its own.

    may_be_alone: something else says that there is one task, so a number 0 without the number of tasks proves nothing: srun sets PMIX_RANK
    for one task too.
    """
    for name, of_tasks in INCOMPLETE:
        is_alone = environment.get(of_tasks) == "1" or (may_be_alone and of_tasks not in environment and environment.get(name) == "0")
        if name not in environment or is_alone:
            continue
        tasks = f" and {of_tasks}={environment[of_tasks]}" if of_tasks in environment else ""
        raise UserError(
            f"{name}={environment[name]}{tasks} {'are' if tasks else 'is'} set, so a launcher has started this process, but not as one "
            "that this program knows; start it with torchrun, srun, mpirun or deepspeed, or export RANK, WORLD_SIZE, LOCAL_RANK and "
            f"LOCAL_WORLD_SIZE in every task, or unset {name} for one rank"
        )


def _kind(environment: Mapping[str, str], launcher: _Launcher) -> str:
    """The launcher by name, as messages and the ids of jobs call it."""
    return "torchrun" if launcher == TORCHRUN and "TORCHELASTIC_RUN_ID" in environment else launcher.name


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. SLURM_PROCID alone does not prove it, because a batch script has it too."""
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    number = whole_number(step)
    return "SLURM_PROCID" in environment and number is not None and number < FIRST_RESERVED_STEP


def _tasks_of_nodes(environment: Mapping[str, str], name: str) -> list[int]:
    """The different numbers in the variable, which may have Slurm's form `8(x4),7`."""
    counts = re.sub(r"\(x\d+\)", "", environment[name]).split(",")
    if any(whole_number(count) is None for count in counts):
        counts = [environment[name]]
    return [_number({name: count}, name) for count in dict.fromkeys(counts)]


def _master_address(environment: Mapping[str, str], launcher: _Launcher, *, has_one_node: bool) -> str | None:
    if "MASTER_ADDR" in environment:
        if not environment["MASTER_ADDR"].strip():
            raise UserError("MASTER_ADDR is empty; export the name or address of the host of rank 0, or unset it")
        return environment["MASTER_ADDR"]
    if has_one_node:
        return "127.0.0.1"
    if launcher in (JOB, STEP):
        node_list = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))
        return None if node_list is None else first_host(node_list)
    return None


def _port(environment: Mapping[str, str], launcher: _Launcher | None) -> int:
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT")
        if not 1 <= port <= LARGEST_PORT:
            raise UserError(f"MASTER_PORT={port} is not a port; choose one from 1 to {LARGEST_PORT} that is free on the host of rank 0")
        return port
    if launcher in (JOB, STEP) and "SLURM_JOB_ID" in environment:
        return FIRST_SLURM_PORT + _number(environment, "SLURM_JOB_ID") % SLURM_PORTS
    return DEFAULT_PORT


def _check_not_left_over(environment: Mapping[str, str], launcher: _Launcher, world_size: int) -> None:
    """Refuses variables of one rank in each of several tasks: they come from the shell, and every task would be a whole run."""
    if launcher != TORCHRUN or world_size > 1 or _kind(environment, launcher) == "torchrun":
        return
    starter = _started_by(environment) or (STEP if _is_slurm_task(environment) else None)
    if starter is None:
        _check_incomplete(environment, may_be_alone=True)
        return
    tasks = environment.get(starter.world_size, "1")
    if tasks != "1":
        raise UserError(
            f"RANK={environment[TORCHRUN.rank]} and WORLD_SIZE=1 are set, but {_kind(environment, starter)} has started {tasks} tasks "
            f"({starter.world_size}), and each would be a run of its own; unset RANK, WORLD_SIZE and LOCAL_RANK for one run of {tasks} "
            f"ranks, or unset {starter.world_size} for {tasks} runs"
        )


def _check_exported_world_size(environment: Mapping[str, str], name: str, world_size: int) -> None:
    exported = environment.get(TORCHRUN.world_size, str(world_size))
    if exported != str(world_size):
        raise UserError(
            f"WORLD_SIZE={exported} and {name}={world_size} differ, and RANK is not set; unset WORLD_SIZE, or start {exported} tasks"
        )


def _check_set(environment: Mapping[str, str], launcher: _Launcher) -> None:
    needed = (launcher.rank, launcher.world_size, launcher.local_rank)
    is_set = [name for name in needed if name in environment]
    missing = [name for name in needed if name not in environment]
    if missing:
        raise UserError(
            f"{' and '.join(is_set)} {'are' if len(is_set) > 1 else 'is'} set, but {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not; set {'them' if len(missing) > 1 else 'it'} as well, or unset "
            f"{' and '.join(is_set)} and start with torchrun, srun, mpirun, deepspeed or plain python"
        )


def _check_below(name: str, number: int, size_name: str, size: int) -> None:
    if number >= size:
        raise UserError(f"the launcher set {name}={number} and {size_name}={size}; ranks count from 0, so correct one of them")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    number = whole_number(text)
    if number is None:
        raise UserError(
            f"the launcher set {name}={text!r}, but a whole number is needed; start with torchrun, srun, mpirun, deepspeed or plain python"
        )
    return number
