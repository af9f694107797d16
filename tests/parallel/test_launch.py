from __future__ import annotations

import pytest

from megatron_zpp.parallel.launch import Launch, read_launch

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
DEEPSPEED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}


def test_torchrun_tells_all_four_numbers() -> None:
    assert read_launch(TORCHRUN) == Launch(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_the_deepspeed_launcher_tells_the_same_as_torchrun() -> None:
    assert read_launch(DEEPSPEED) == read_launch(TORCHRUN)


def test_the_deepspeed_launcher_inside_a_slurm_job_goes_before_slurm() -> None:
    assert read_launch(SLURM | DEEPSPEED) == read_launch(DEEPSPEED)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"])
def test_a_variable_of_the_deepspeed_launcher_that_is_not_a_number_is_named_with_its_value(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='four'.*deepspeed"):
        read_launch(DEEPSPEED | {name: "four"})


def test_local_size_stands_in_for_local_world_size() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert read_launch(environment).local_world_size == 2


def test_slurm_tells_all_four_numbers() -> None:
    assert read_launch(SLURM) == Launch(rank=3, world_size=4, local_rank=1, local_world_size=2)


def test_slurm_without_tasks_per_node_leaves_the_local_world_size_open() -> None:
    assert read_launch({name: value for name, value in SLURM.items() if name != "SLURM_NTASKS_PER_NODE"}).local_world_size is None


def test_torchrun_inside_a_slurm_job_goes_by_torchrun() -> None:
    assert read_launch(SLURM | TORCHRUN) == read_launch(TORCHRUN)


def test_one_slurm_task_or_nothing_at_all_is_one_rank_on_its_own() -> None:
    assert read_launch({}) == Launch(0, 1, 0, 1)
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Launch(0, 1, 0, 1)


def test_openmpi_variables_alone_do_not_make_a_world() -> None:
    assert read_launch({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}) == Launch(0, 1, 0, 1)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_torchrun_variable_that_is_not_a_number_is_named_with_its_value(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='four'"):
        read_launch(TORCHRUN | {name: "four"})


@pytest.mark.parametrize("name", list(SLURM))
def test_a_slurm_variable_that_is_not_a_number_is_named_with_its_value(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='four'"):
        read_launch(SLURM | {name: "four"})


def test_a_world_without_a_rank_is_refused_naming_the_missing_variable() -> None:
    with pytest.raises(ValueError, match="RANK=''"):
        read_launch({"WORLD_SIZE": "2"})
