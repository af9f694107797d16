"""A step of the GPT on streams of the model machine: the host waits once, for the norm and the numbers of all ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.fake_streams.machine import Site

from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.step import forward_backward, row_of
from megatron_zpp.zero import optimizer_step
from megatron_zpp.zero.norms import squared_sums_at_once
from testbed.session import LEARNING_RATE, RankPlace, Session

pytestmark = pytest.mark.virtual

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 24 --make-vocab-size-divisible-by 8 --mock-data "
    "--train-iters 10 --micro-batch-size 1 --global-batch-size 2 --ranks-per-node 2 --bf16"
)
DOCUMENTS = "--reset-attention-mask --reset-position-ids"
CASES = {
    "documents, dropout": (f"--zero-stage 3 {DOCUMENTS} --attention-dropout 0.1 --hidden-dropout 0.1", Grid.of_nodes(1, 2)),
    "tensor ranks, recomputation, loss in chunks": (
        "--zero-stage 2 --tensor-model-parallel-size 2 --sequence-parallel --checkpoint-activations --loss-chunk-tokens 4",
        Grid.of_nodes(1, 2, 2),
    ),
    "context ranks, documents": (f"--zero-stage 3 {DOCUMENTS} --context-parallel-size 2", Grid.of_nodes(1, 2, 1, 2)),
}


def waits(flags: str, gpu: Gpu) -> list[str]:
    """The lines at which the host waits in one step, whose micro-batches it has."""
    session = Session(f"{TINY} {flags}", RankPlace(gpu.backend, gpu.lanes, torch.device("cpu"), gpu.machine))
    batches = list(session.batches(0))
    begin = len(gpu.machine.log)
    loss_sum = forward_backward(session.model, session.engine, iter(batches), session.microbatches)
    session.engine.update(LEARNING_RATE, report=row_of([loss_sum, 1.0], session.engine.device))
    found = [f"{entry.call} at {entry.file}" for entry in gpu.machine.log[begin:] if isinstance(entry, Site)]
    session.close()
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_once_in_a_step_of_the_gpt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_step, "squared_sums_for", lambda *_: squared_sums_at_once)  # as on a GPU
    flags, grid = CASES[name]
    assert run_on_gpus(grid, partial(waits, flags)) == [["synchronize at host_link.py"]] * grid.world_size
