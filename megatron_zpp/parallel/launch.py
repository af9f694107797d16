"""Reads this process's rank, the world size and the address of rank 0 from the environment of its launcher (no torch)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_zpp.config.flag import whole_number
from megatron_zpp.parallel.job_ids import JobIds, read_job_ids

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
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    master_address: str | None = None
    master_port: int = DEFAULT_PORT
    torchrun_holds_store: bool = False
    job: JobIds = field(default=JobIds(), compare=False)


@dataclass(frozen=True)
class SchedulerJob:
    """The scheduler's id of this job, empty without one, and how often the scheduler has started it again."""

    name: str = ""
    restarts: int = 0


@dataclass(frozen=True)
class _Names:
    """The variables that one kind of launcher sets. Of local_world_sizes the first that is set counts; there may be none."""

    rank: str
    world_size: str
    local_rank: str
    local_world_sizes: tuple[str, ...]


TORCHRUN = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))  # LOCAL_SIZE is DeepSpeed's
OPEN_MPI = _Names("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",))
HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",))  # mpirun of MPICH and Intel MPI
# Variables of a step override those of the job: srun may have other options than sbatch.
JOB = _Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"))
STEP = replace(JOB, world_size="SLURM_STEP_NUM_TASKS")


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Reads the variables of torchrun or DeepSpeed's launcher, or else of mpirun, or else of Slurm. Without any, the world has one rank.

    Raises ValueError naming a variable that is missing, not a number, or contradicts another.
    """
    names = _launcher(environment)
    if names is None:
        return Launch(0, 1, 0, 1, environment.get("MASTER_ADDR"), _port(environment, None))
    _check_set(environment, names)
    job = read_job_ids(environment, _kind(environment, names))
    rank, world_size, local_rank = (_number(environment, name) for name in (names.rank, names.world_size, names.local_rank))
    local_name = next((name for name in names.local_world_sizes if name in environment), "")
    local_world_size = _tasks_of_a_node(environment, local_name) if local_name else None
    _check_below(names.rank, rank, names.world_size, world_size)
    if local_world_size is not None:
        _check_below(names.local_rank, local_rank, local_name, local_world_size)
        if local_world_size > world_size:
            raise ValueError(f"the launcher set {local_name}={local_world_size} and {names.world_size}={world_size}; correct one of them")
    _check_not_left_over(environment, names, world_size)
    _check_exported_world_size(environment, names.world_size, world_size)
    address = _master_address(environment, names, has_one_node=1 < world_size == local_world_size)
    holds_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, world_size, local_rank, local_world_size, address, _port(environment, names), holds_store, job)


def read_job(environment: Mapping[str, str]) -> SchedulerJob:
    """The job of Slurm that this process belongs to."""
    job, cluster = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_CLUSTER_NAME", "")
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    name = f"{job} of {cluster}" if job and cluster else job
    return SchedulerJob(name, int(restarts) if restarts.isascii() and restarts.isdigit() else 0)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process: torchrun, DeepSpeed's, mpirun or srun. A shell is not one."""
    if "TORCHELASTIC_RUN_ID" in environment or any(names.local_rank in environment for names in (OPEN_MPI, HYDRA)):
        return True
    world_size = environment.get(TORCHRUN.world_size, "")
    is_one_of_several = TORCHRUN.local_rank in environment and world_size.isdigit() and int(world_size) > 1
    return is_one_of_several or _is_slurm_task(environment)


def first_host(node_list: str) -> str:
    """The first host of a node list in Slurm's short form: node07 for `node[07-12,20],login1`."""
    outside_brackets = r"(?:[^,\[]|\[[^\]]*\])*"
    first = re.findall(outside_brackets, node_list)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _launcher(environment: Mapping[str, str]) -> _Names | None:
    mpirun = _mpirun(environment)
    # A batch script may export WORLD_SIZE alone, for the tasks that srun or mpirun starts.
    if TORCHRUN.world_size in environment and (TORCHRUN.rank in environment or not (mpirun or _is_slurm_task(environment))):
        return TORCHRUN
    if mpirun is not None:
        return mpirun
    slurm = STEP if STEP.world_size in environment else JOB
    if slurm.rank not in environment:
        return None
    is_task = _is_slurm_task(environment)
    # In the batch script of a job without --ntasks, SLURM_PROCID is set, but not the number of tasks.
    if (not is_task and slurm.world_size not in environment) or _number(environment, slurm.world_size) == 1:
        return None
    if not is_task:
        tasks = environment[slurm.world_size]
        raise ValueError(
            f"this Slurm job has {slurm.world_size}={tasks}, but srun did not start this process, so it would be the only one of {tasks}; "
            f"start it with srun or torchrun, or unset {slurm.world_size} for one rank"
        )
    return slurm


def _mpirun(environment: Mapping[str, str]) -> _Names | None:
    return next((names for names in (OPEN_MPI, HYDRA) if names.local_rank in environment), None)


def _kind(environment: Mapping[str, str], names: _Names) -> str:
    """The launcher by name, as messages and the ids of jobs call it."""
    if names in (JOB, STEP):
        return "srun"
    if names == TORCHRUN:
        return "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "RANK and WORLD_SIZE"
    return "Open MPI" if names == OPEN_MPI else "MPICH or Intel MPI"


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. SLURM_PROCID alone does not prove it, because a batch script has it too."""
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    number = whole_number(step)
    return "SLURM_PROCID" in environment and number is not None and number < FIRST_RESERVED_STEP


def _tasks_of_a_node(environment: Mapping[str, str], name: str) -> int | None:
    """The number in the variable, which may have Slurm's form `8(x4)`; None if nodes have different numbers of tasks."""
    counts = set(re.sub(r"\(x\d+\)", "", environment[name]).split(","))
    if len(counts) > 1 and all(whole_number(count) is not None for count in counts):
        return None
    return _number({name: counts.pop() if len(counts) == 1 else environment[name]}, name)


def _master_address(environment: Mapping[str, str], names: _Names, *, has_one_node: bool) -> str | None:
    if "MASTER_ADDR" in environment:
        if not environment["MASTER_ADDR"].strip():
            raise ValueError("MASTER_ADDR is empty; export the name or address of the host of rank 0, or unset it")
        return environment["MASTER_ADDR"]
    if has_one_node:
        return "127.0.0.1"
    if names in (JOB, STEP):
        node_list = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))
        return None if node_list is None else first_host(node_list)
    return None


def _port(environment: Mapping[str, str], names: _Names | None) -> int:
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT")
        if not 1 <= port <= LARGEST_PORT:
            raise ValueError(f"MASTER_PORT={port} is not a port; choose one from 1 to {LARGEST_PORT} that is free on the host of rank 0")
        return port
    if names in (JOB, STEP) and "SLURM_JOB_ID" in environment:
        return FIRST_SLURM_PORT + _number(environment, "SLURM_JOB_ID") % SLURM_PORTS
    return DEFAULT_PORT


def _check_not_left_over(environment: Mapping[str, str], names: _Names, world_size: int) -> None:
    """Refuses variables of one rank in each of several tasks: they come from the shell, and every task would be a whole run."""
    if names != TORCHRUN or world_size > 1 or _kind(environment, names) == "torchrun":
        return
    starter = _mpirun(environment) or (STEP if _is_slurm_task(environment) else None)
    tasks = environment.get(starter.world_size, "1") if starter is not None else "1"
    if starter is not None and tasks != "1":
        raise ValueError(
            f"RANK={environment[TORCHRUN.rank]} and WORLD_SIZE=1 are set, but {_kind(environment, starter)} has started {tasks} tasks "
            f"({starter.world_size}), and each would be a run of its own; unset RANK, WORLD_SIZE and LOCAL_RANK for one run of {tasks} "
            f"ranks, or unset {starter.world_size} for {tasks} runs"
        )


def _check_exported_world_size(environment: Mapping[str, str], name: str, world_size: int) -> None:
    exported = environment.get(TORCHRUN.world_size, str(world_size))
    if exported != str(world_size):
        raise ValueError(
            f"WORLD_SIZE={exported} and {name}={world_size} differ, and RANK is not set; unset WORLD_SIZE, or start {exported} tasks"
        )


def _check_set(environment: Mapping[str, str], names: _Names) -> None:
    needed = (names.rank, names.world_size, names.local_rank)
    is_set = [name for name in needed if name in environment]
    missing = [name for name in needed if name not in environment]
    if missing:
        raise ValueError(
            f"{' and '.join(is_set)} {'are' if len(is_set) > 1 else 'is'} set, but {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not; set {'them' if len(missing) > 1 else 'it'} as well, or start with torchrun, srun, "
            "mpirun, deepspeed or plain python"
        )


def _check_below(name: str, number: int, size_name: str, size: int) -> None:
    if number >= size:
        raise ValueError(f"the launcher set {name}={number} and {size_name}={size}; ranks count from 0, so correct one of them")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    number = whole_number(text)
    if number is None:
        raise ValueError(
            f"the launcher set {name}={text!r}, but a whole number is needed; start with torchrun, srun, mpirun, deepspeed or plain python"
        )
    return number
