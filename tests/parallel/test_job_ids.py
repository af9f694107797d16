"""Ranks of one job have ids that do not differ, and those of two jobs have ids that do."""

from __future__ import annotations

import pytest

from megatron_zpp.parallel.job_ids import JOB_VARIABLE, JobIds
from megatron_zpp.parallel.launch import read_launch
from megatron_zpp.system.user_error import UserError

BY_HAND = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN = BY_HAND | {"TORCHELASTIC_RUN_ID": "none"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items()}
PALS = {"PMI_RANK": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "1", "PBS_JOBID": "5"}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def ids(environment: dict[str, str]) -> JobIds:
    return read_launch(environment).job


@pytest.mark.parametrize(
    "one, other",
    [
        (SRUN, SRUN | {"SLURM_JOB_ID": "78"}),
        (SRUN, SRUN | {"SLURM_STEP_ID": "1"}),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "a"}, TORCHRUN | {"TORCHELASTIC_RUN_ID": "b"}),
        (TORCHRUN | {"SLURM_JOB_ID": "77"}, TORCHRUN | {"SLURM_JOB_ID": "78"}),
        (OPEN_MPI | {"PMIX_NAMESPACE": "5"}, OPEN_MPI | {"PMIX_NAMESPACE": "6"}),
        (OPEN_MPI | {"OMPI_MCA_ess_base_jobid": "5"}, OPEN_MPI | {"OMPI_MCA_ess_base_jobid": "6"}),
        (HYDRA | {"PMI_JOBID": "5"}, HYDRA | {"PMI_JOBID": "6"}),
        (PALS | {"PALS_APID": "5"}, PALS | {"PALS_APID": "6"}),
        (FLUX | {"FLUX_JOB_ID": "f5"}, FLUX | {"FLUX_JOB_ID": "f6"}),
        (HYDRA | {"PBS_JOBID": "5.server"}, HYDRA | {"PBS_JOBID": "6.server"}),
        (HYDRA | {"LSB_JOBID": "5", "LSB_JOBINDEX": "1"}, HYDRA | {"LSB_JOBID": "5", "LSB_JOBINDEX": "2"}),
        (BY_HAND | {JOB_VARIABLE: "a"}, BY_HAND | {JOB_VARIABLE: "b"}),
        (BY_HAND, TORCHRUN),  # whoever started them did not start them together
    ],
)
def test_ids_of_two_jobs_differ(one: dict[str, str], other: dict[str, str]) -> None:
    assert ids(one).differ_from(ids(other)) and ids(other).differ_from(ids(one))


@pytest.mark.parametrize(
    "one, other",
    [
        (SRUN, SRUN | {"SLURM_PROCID": "0"}),
        (
            TORCHRUN | {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"},
            TORCHRUN | {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"},
        ),  # a step per node
        (SRUN | {"SLURM_HET_JOB_ID": "77"}, SRUN | {"SLURM_HET_JOB_ID": "77", "SLURM_JOB_ID": "78"}),  # two parts of one job
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "77"}, TORCHRUN | {"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "78"}),
        (BY_HAND | {"SLURM_JOB_ID": "77"}, BY_HAND),  # a shell of the scheduler, and another host over ssh
        (BY_HAND | {JOB_VARIABLE: "a", "SLURM_JOB_ID": "77"}, BY_HAND | {JOB_VARIABLE: "a", "SLURM_JOB_ID": "78"}),
        (BY_HAND | {JOB_VARIABLE: "a"}, TORCHRUN | {JOB_VARIABLE: "a"}),  # the user's own word counts
        (BY_HAND, BY_HAND),
    ],
)
def test_ids_of_one_job_do_not_differ_whatever_its_hosts_know(one: dict[str, str], other: dict[str, str]) -> None:
    assert not ids(one).differ_from(ids(other)) and not ids(other).differ_from(ids(one))


def test_the_most_reliable_id_is_the_one_that_messages_show() -> None:
    assert str(ids(SRUN)) == "SLURM_JOB_ID.SLURM_STEP_ID=77.0"
    assert str(ids(TORCHRUN | {"SLURM_JOB_ID": "77", JOB_VARIABLE: "a"})) == f"{JOB_VARIABLE}=a"
    assert str(ids(TORCHRUN)) == "no job id"


@pytest.mark.parametrize("value", ["x" * 201, "two\nlines"])
def test_an_id_that_no_message_could_show_is_refused_by_its_variable(value: str) -> None:
    with pytest.raises(UserError, match=f"{JOB_VARIABLE} has {len(value)} characters.*; choose another"):
        read_launch(BY_HAND | {JOB_VARIABLE: value})
    with pytest.raises(UserError, match=f"PMIX_NAMESPACE has .*; export {JOB_VARIABLE}, the same on every rank, and unset it"):
        read_launch(OPEN_MPI | {"PMIX_NAMESPACE": value})


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_that_does_not_exist_is_refused(port: str) -> None:
    with pytest.raises(UserError, match=f"MASTER_PORT={port} is not a port; choose one from 1 to 65535"):
        read_launch(BY_HAND | {"MASTER_PORT": port})


def test_an_empty_address_is_refused() -> None:
    with pytest.raises(UserError, match="MASTER_ADDR is empty; export the name or address"):
        read_launch(BY_HAND | {"MASTER_ADDR": " "})
