from __future__ import annotations

import re

import pytest

from megatron_zpp.parallel.launch import Launch, SchedulerJob, first_host, is_launched, read_job, read_launch
from megatron_zpp.system.user_error import UserError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
DEEPSPEED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_ID": "0"}
SLURM_JOB = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "login1,node[07-12]", "SLURM_STEP_NODELIST": "node[07-08]"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
INTEL_MPI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
MVAPICH2 = {name.replace("OMPI", "MV2"): number for name, number in OPEN_MPI.items()}
JSRUN = {name.replace("OMPI_COMM_WORLD", "JSM_NAMESPACE"): number for name, number in OPEN_MPI.items()}
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "PMI_RANK": "5", "PMI_SIZE": "8"}
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
BATCH_STEP, INTERACTIVE_STEP = "4294967291", "4294967290"


AT_NODE07 = {"master_address": "node07", "master_port": 15000 + 1234567 % 15000}


def without(environment: dict[str, str], name: str) -> dict[str, str]:
    return {other: value for other, value in environment.items() if other != name}


def test_torchrun_tells_all_four_numbers() -> None:
    assert read_launch(TORCHRUN) == Launch(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_the_deepspeed_launcher_tells_the_same_as_torchrun() -> None:
    assert read_launch(DEEPSPEED) == read_launch(TORCHRUN)


def test_the_deepspeed_launcher_inside_a_slurm_job_goes_before_slurm() -> None:
    assert read_launch(SLURM | DEEPSPEED) == read_launch(DEEPSPEED)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"])
def test_a_variable_of_the_deepspeed_launcher_that_is_not_a_number_is_named_with_its_value(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}='four'.*deepspeed"):
        read_launch(DEEPSPEED | {name: "four"})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK and WORLD_SIZE are set, but LOCAL_RANK is not; set it as well, or unset RANK and WOR",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK and LOCAL_RANK are not; set them as well, or unset WORLD_SIZE and start with"),
    ],
)
def test_variables_that_are_not_set_beside_others_are_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=f"^{words}"):
        read_launch(environment)


@pytest.mark.parametrize("environment", [{"RANK": "1"}, {"LOCAL_RANK": "1"}, {"RANK": "1", "LOCAL_RANK": "1"}])
def test_a_rank_without_a_world_size_is_not_a_world_of_one(environment: dict[str, str]) -> None:
    with pytest.raises(UserError, match=" set, but .*WORLD_SIZE"):
        read_launch(environment)


def test_local_size_stands_in_for_local_world_size() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert read_launch(environment).local_world_size == 2


def test_slurm_tells_all_four_numbers() -> None:
    assert read_launch(SLURM | SLURM_JOB) == Launch(rank=3, world_size=4, local_rank=1, local_world_size=2, **AT_NODE07)


def test_slurm_without_tasks_per_node_leaves_the_local_world_size_open() -> None:
    assert read_launch(without(SLURM, "SLURM_NTASKS_PER_NODE")).local_world_size is None


@pytest.mark.parametrize(
    "words, counts", [("3,1", "3 and 1"), ("2(x1),1(x2)", "2 and 1"), ("2(x3),1", "2 and 1"), ("2,2(x2),1,2", "2 and 1")]
)
def test_nodes_with_different_numbers_of_tasks_are_refused_by_these_numbers_unless_the_ranks_of_a_node_are_given(
    words: str, counts: str
) -> None:
    launch = read_launch(SLURM | {"SLURM_STEP_TASKS_PER_NODE": words})
    with pytest.raises(UserError, match=rf"^SLURM_STEP_TASKS_PER_NODE={re.escape(words)}: nodes have {counts} ranks, but all nodes must"):
        launch.check_equal_nodes(None)
    launch.check_equal_nodes(1)
    read_launch(SLURM).check_equal_nodes(None)


@pytest.mark.parametrize("words, count", [("2", 2), ("2(x2)", 2), ("4", 4), ("3,1", None), ("2(x1),1(x2)", None)])
def test_the_tasks_of_a_step_go_before_those_that_the_job_asked_for(words: str, count: int | None) -> None:
    assert read_launch(SLURM | {"SLURM_STEP_TASKS_PER_NODE": words}).local_world_size == count


def test_the_number_of_tasks_of_a_step_goes_before_that_of_the_job() -> None:
    assert read_launch(SLURM | {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "4"}) == read_launch(SLURM)


def test_torchrun_inside_a_slurm_job_goes_by_torchrun() -> None:
    assert read_launch(SLURM | SLURM_JOB | TORCHRUN) == read_launch(TORCHRUN)


def test_a_world_size_that_the_batch_script_exports_may_agree_with_slurm_and_must_not_differ() -> None:
    assert read_launch(SLURM | {"WORLD_SIZE": "4"}) == read_launch(SLURM)
    with pytest.raises(UserError, match="WORLD_SIZE=2 and SLURM_NTASKS=4 differ.*unset WORLD_SIZE"):
        read_launch(SLURM | {"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("started", "size"), [(SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS"), (OPEN_MPI, "OMPI_COMM_WORLD_SIZE")]
)
def test_variables_of_one_rank_in_each_of_several_tasks_are_refused_unless_torchrun_set_them(started: dict[str, str], size: str) -> None:
    tasks, alone = started[size], Launch(0, 1, 0, None)
    with pytest.raises(
        ValueError, match=rf"^RANK=0 and WORLD_SIZE=1 are set, but .* {tasks} tasks \({size}\).* unset {size} for {tasks} runs$"
    ):
        read_launch(started | ONE_RANK)
    assert read_launch(started | ONE_RANK | {"TORCHELASTIC_RUN_ID": "none"}) == alone
    assert read_launch(without(started, size) | ONE_RANK) == alone
    assert read_launch(started | {size: "1"} | ONE_RANK) == alone


@pytest.mark.parametrize("step", [BATCH_STEP, INTERACTIVE_STEP])
def test_variables_of_one_rank_are_that_rank_in_the_shell_of_a_job_of_several_tasks(step: str) -> None:
    assert read_launch(SLURM | {"SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "4"} | ONE_RANK) == Launch(0, 1, 0, None)


@pytest.mark.parametrize("step", [None, BATCH_STEP, INTERACTIVE_STEP])
def test_a_process_that_srun_did_not_start_is_refused_in_a_job_of_several_tasks(step: str | None) -> None:
    environment = without(SLURM, "SLURM_STEP_ID") | ({} if step is None else {"SLURM_STEP_ID": step})
    with pytest.raises(UserError, match="SLURM_NTASKS=4, but srun did not start this process.*srun or torchrun"):
        read_launch(environment)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": BATCH_STEP}])
def test_a_batch_script_without_a_number_of_tasks_is_one_rank_on_its_own(step: dict[str, str]) -> None:
    assert read_launch({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node7", **step}) == Launch(0, 1, 0, 1)


def test_one_slurm_task_or_nothing_at_all_is_one_rank_on_its_own() -> None:
    assert read_launch({}) == Launch(0, 1, 0, 1)
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Launch(0, 1, 0, 1)


@pytest.mark.parametrize(
    "variables",
    [OPEN_MPI, INTEL_MPI, PALS, MVAPICH2, JSRUN, JSRUN | OPEN_MPI, MVAPICH2 | INTEL_MPI],
    ids=["Open MPI", "Intel MPI", "HPE PALS", "MVAPICH2", "jsrun", "jsrun of Spectrum MPI", "MVAPICH2 over Hydra"],
)
def test_mpirun_tells_the_same_as_torchrun_also_inside_a_slurm_job(variables: dict[str, str]) -> None:
    assert read_launch(variables) == read_launch(TORCHRUN)
    assert read_launch(SLURM | {"SLURM_STEP_ID": BATCH_STEP} | variables) == read_launch(TORCHRUN)


def test_flux_inside_a_step_of_slurm_tells_all_but_the_ranks_of_a_node() -> None:
    assert read_launch(SLURM | FLUX) == Launch(rank=5, world_size=8, local_rank=1, local_world_size=None)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, "PMI_RANK=5 and PMI_SIZE=8 are set"),
        ({"PMI_ID": "5", "PMI_PORT": "node7:4000"}, "PMI_ID=5 is set"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"}, "PMIX_RANK=0 is set"),
        ({"PALS_RANKID": "5", "PALS_NODEID": "1"}, "PALS_RANKID=5 is set"),
        ({"ALPS_APP_PE": "5"}, "ALPS_APP_PE=5 is set"),
        ({"MPT_LRANK": "1"}, "MPT_LRANK=1 is set"),
        ({"MP_CHILD": "5", "MP_PROCS": "8"}, "MP_CHILD=5 and MP_PROCS=8 are set"),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2", "MASTER_ADDR": "pod-0"}, "PET_NODE_RANK=1 and PET_NNODES=2 are set"),
    ],
)
def test_a_task_whose_launcher_says_too_little_is_refused_by_its_variables_and_never_a_world_of_one(
    environment: dict[str, str], named: str
) -> None:
    name = named.split("=")[0]
    with pytest.raises(UserError, match=f"^{named}.*; start it with torchrun.* export RANK, WORLD_SIZE.* unset {name} for one rank$"):
        read_launch(environment)
    assert read_launch(environment | TORCHRUN).rank == 5


@pytest.mark.parametrize("one", [ONE_RANK, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"SLURM_PROCID": "0", "SLURM_STEP_ID": BATCH_STEP}])
def test_inside_a_job_of_one_task_such_a_launcher_is_refused_where_its_variables_prove_several_tasks(one: dict[str, str]) -> None:
    for several in ({"PMIX_RANK": "3"}, {"PMI_RANK": "0", "PMI_SIZE": "8"}, {"PALS_RANKID": "5"}):
        with pytest.raises(UserError, match=f"^{next(iter(several))}=. .*set, so a launcher has started this process"):
            read_launch(one | several)
    for of_srun in ({"PMIX_RANK": "0"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}):  # srun sets them also for one task and in a shell
        assert read_launch(one | of_srun).world_size == 1


def test_a_launcher_with_all_variables_goes_before_one_that_lacks_some() -> None:
    assert read_launch(INTEL_MPI | {"MV2_COMM_WORLD_LOCAL_RANK": "1"}) == read_launch(INTEL_MPI)


@pytest.mark.parametrize("environment", [{"PMI_RANK": "0", "PMI_SIZE": "1"}, {"PET_NODE_RANK": "0", "PET_NNODES": "1"}])
def test_the_only_task_of_such_a_launcher_is_one_rank_on_its_own(environment: dict[str, str]) -> None:
    assert read_launch(environment) == Launch(0, 1, 0, 1)


@pytest.mark.parametrize("variables", [OPEN_MPI, INTEL_MPI, PALS, MVAPICH2, JSRUN, FLUX])
def test_a_launcher_that_leaves_out_the_size_of_the_world_is_refused_by_the_name_of_that_variable(variables: dict[str, str]) -> None:
    size = next(name for name in variables if name.endswith("_SIZE") and "LOCAL" not in name)
    with pytest.raises(UserError, match=f" set, but .*{size}"):
        read_launch({name: value for name, value in variables.items() if name != size})


def test_the_pmi_variables_of_srun_do_not_make_it_mpirun() -> None:
    assert read_launch(SLURM | {"PMI_RANK": "9", "PMI_SIZE": "16"}) == read_launch(SLURM)


@pytest.mark.parametrize("environment", [TORCHRUN, OPEN_MPI, DEEPSPEED], ids=["torchrun", "Open MPI", "deepspeed"])
def test_master_address_and_port_are_taken_from_the_environment(environment: dict[str, str]) -> None:
    launch = read_launch(environment | {"MASTER_ADDR": "node3", "MASTER_PORT": "6000"})
    assert (launch.master_address, launch.master_port) == ("node3", 6000)


def test_without_master_address_slurms_first_node_is_taken_and_a_port_of_the_job() -> None:
    launch = read_launch(SLURM | SLURM_JOB)
    assert (launch.master_address, launch.master_port) == ("node07", 15000 + 1234567 % 15000)
    others = {read_launch(SLURM | SLURM_JOB | {"SLURM_JOB_ID": str(1234567 + more)}).master_port for more in range(100)}
    assert len(others) == 100 and all(1024 < port < 32768 for port in others)


def test_without_master_address_a_world_of_one_node_meets_on_that_node_and_others_say_nothing() -> None:
    assert read_launch(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}).master_address == "127.0.0.1"
    assert read_launch(OPEN_MPI).master_address is None


@pytest.mark.parametrize(
    "node_list, first",
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("node[07-12,20],login1", "node07"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("gpu-[003,001]-ib,x", "gpu-003-ib"),
    ],
)
def test_first_host_of_slurms_list_of_nodes(node_list: str, first: str) -> None:
    assert first_host(node_list) == first


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"RANK": "8"}, "RANK=8 and WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 and LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE=16 and WORLD_SIZE=8"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_variables_that_contradict_each_other_are_named(changed: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        read_launch(TORCHRUN | changed)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_torchrun_variable_that_is_not_a_number_is_named_with_its_value(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}='four'"):
        read_launch(TORCHRUN | {name: "four"})


@pytest.mark.parametrize("name", [name for name in SLURM if name != "SLURM_STEP_ID"])
def test_a_slurm_variable_that_is_not_a_number_is_named_with_its_value(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}='four'"):
        read_launch(SLURM | {name: "four"})


def test_a_world_without_a_rank_is_refused_naming_the_missing_variable() -> None:
    with pytest.raises(UserError, match="WORLD_SIZE is set, but RANK and LOCAL_RANK are not"):
        read_launch({"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, False),  # a batch script
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}, True),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, True),
        ({"MPI_LOCALRANKID": "0"}, True),
        ({"PALS_LOCAL_RANKID": "0"}, True),
        ({"FLUX_TASK_RANK": "0"}, True),
        ({"FLUX_JOB_SIZE": "2", "PMI_RANK": "0"}, False),
    ],
)
def test_a_shell_or_a_batch_script_is_no_launcher(environment: dict[str, str], expected: bool) -> None:
    assert is_launched(environment) == expected


def test_a_job_that_slurm_has_queued_again_counts_its_restarts() -> None:
    assert read_job({}) == SchedulerJob("", 0)
    assert read_job({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "big"}) == SchedulerJob("7 of big", 0)
    assert read_job({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == SchedulerJob("7", 2)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["\u00b2", "\u0663", "9" * 30, "9" * 5000, "1_0", "+1"])
def test_a_variable_that_is_not_in_plain_digits_is_named(name, text):
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500", "MASTER_ADDR": "a"}
    with pytest.raises(UserError, match=f"^the launcher set {name}=.*, but a whole number is needed"):
        read_launch({**environment, name: text})
