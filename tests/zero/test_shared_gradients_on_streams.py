"""Gradients of what tensor ranks share, on the streams of a device: in order, and without a wait of the host."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness.divided_model import SHAPE, DividedRank, History, train_divided
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.fake_streams.machine import Launch, Site
from harness.small_engine import LEARNING_RATE, Job, ModelShape

from megatron_zpp.ops import extension
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero import optimizer_step
from megatron_zpp.zero.norms import squared_sums_at_once
from megatron_zpp.zero.policy import POLICIES, ZEROPP

pytestmark = pytest.mark.virtual

GRID = Grid.of_nodes(1, 4, tensor_ranks=2)
JOBS = {
    "stage 0": Job(POLICIES[0], shape=SHAPE, steps=2),
    "stage 2": Job(POLICIES[2], shape=SHAPE, steps=2),
    "ZeRO++": Job(ZEROPP, torch.bfloat16, SHAPE, steps=2, microbatches=2),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of squares that a GPU gets, and no kernels that another test of this process has loaded."""
    monkeypatch.setattr(optimizer_step, "squared_sums_for", lambda *_: squared_sums_at_once)
    monkeypatch.setattr(extension, "has_kernels_for", lambda device_type: False)


@pytest.mark.parametrize("name", JOBS)
def test_runs_on_streams_have_an_order_for_every_access_and_the_bits_of_runs_without(name: str) -> None:
    def program(gpu: Gpu) -> History:
        return DividedRank(JOBS[name], gpu.backend, lanes=gpu.lanes, streams=gpu.machine, groups=1).train()

    assert run_on_gpus(GRID, program) == train_divided(GRID, JOBS[name], groups=1).histories


def finishing(job: Job, gpu: Gpu) -> tuple[list[Launch | Site], list[Launch | Site]]:
    """What the host does in the second step: to finish the gradients, and in the whole step after backward."""
    rank = DividedRank(job, gpu.backend, lanes=gpu.lanes, streams=gpu.machine, groups=1)
    for step in range(2):
        rank.accumulate(step)
        begin = len(gpu.machine.log)
        rank.engine.finish_gradients()
        finished = len(gpu.machine.log)
        rank.engine.update(LEARNING_RATE)
    finish, all_of_it = gpu.machine.log[begin:finished], gpu.machine.log[begin:]
    rank.engine.close()
    return finish, all_of_it


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", JOBS)
def test_the_host_waits_for_the_norm_alone(name: str) -> None:
    for finish, all_of_it in run_on_gpus(GRID, partial(finishing, JOBS[name])):
        assert [f"{entry.call} at {entry.file}" for entry in all_of_it if isinstance(entry, Site)] == ["synchronize at host_link.py"]
        assert sum(isinstance(entry, Launch) and entry.operation.startswith("gather tensor") for entry in finish) == 1


@pytest.mark.usefixtures("as_on_a_gpu")
def test_more_units_need_no_more_operations_to_make_shared_gradients_equal() -> None:
    def operations(blocks: int) -> list[str]:
        job = Job(POLICIES[3], shape=ModelShape((24,) * blocks), steps=2)
        finish, _ = run_on_gpus(GRID, partial(finishing, job))[0]
        own = ("shared_gradients.py", "tensor_link.py")
        return [f"{entry.file} {entry.operation}" for entry in finish if isinstance(entry, Launch) and entry.file in own]

    assert operations(1) == operations(3) != []
