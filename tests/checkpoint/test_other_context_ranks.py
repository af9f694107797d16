"""A checkpoint does not depend on which ranks divide samples: what some have saved, others find, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.divided_gpt import GptRank
from harness.divided_model import History, State, Stated, bits_of, whole_state
from harness.small_engine import LEARNING_RATE, Job, mean_losses
from harness.small_state import Gathering
from harness.worlds import run_world

from megatron_zpp.checkpoint.engine_state import EngineState
from megatron_zpp.checkpoint.folders import iteration_folder
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import POLICIES

pytestmark = pytest.mark.virtual

SAVED_AT, STEPS = 2, 4
SAVING_GRID = Grid.of_nodes(2, 2, context_ranks=2)


def rank_of(stage: int, backend: VirtualBackend) -> GptRank:
    return GptRank(Job(POLICIES[stage], steps=STEPS, block_numel=256), backend, gpt="Llama 3")


def train(rank: GptRank, first: int, last: int) -> History:
    return [(rank.accumulate(step), rank.engine.step(LEARNING_RATE).grad_norm) for step in range(first, last)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, list[History]]:
    """The folder, the state that the run has saved, and the histories of the steps to its end."""
    directory, gathering = tmp_path_factory.mktemp("saved"), Gathering(SAVING_GRID.world_size)

    def program(backend: VirtualBackend) -> tuple[Stated, History]:
        rank = rank_of(3, backend)
        train(rank, 0, SAVED_AT)
        saver = CheckpointSaver(directory, EngineState(rank.engine).share(with_moments=True), SaveOptions(), gathering.of(backend.rank))
        saver.save(EngineState(rank.engine).manifest(Progress(SAVED_AT, 96, 96), {}, with_moments=True))
        stated, history = rank.stated(), train(rank, SAVED_AT, STEPS)
        saver.finish()
        rank.engine.close()
        return stated, history

    results = run_world(SAVING_GRID, program)
    return directory, whole_state((pieces for (pieces, _), _ in results), results[0][0][1]), [history for _, history in results]


@pytest.mark.parametrize(
    "grid, stage",
    [
        (SAVING_GRID, 3),
        (SAVING_GRID, 0),
        (Grid.of_nodes(2, 2), 3),
        (Grid.of_nodes(1, 1), 0),
        (Grid.of_nodes(2, 2, 1, 4), 2),
        (Grid.of_nodes(1, 4, 2, 2), 1),
    ],
    ids=str,
)
def test_any_number_of_context_ranks_finds_the_weights_and_moments_that_two_have_saved(
    saved: tuple[Path, State, list[History]], grid: Grid, stage: int
) -> None:
    directory, stored, unbroken = saved

    def program(backend: VirtualBackend) -> tuple[Stated, History]:
        rank = rank_of(stage, backend)
        rank.engine.start_iteration(SAVED_AT)
        with CheckpointReader(iteration_folder(directory, SAVED_AT)) as reader:
            EngineState(rank.engine).load(reader, with_moments=True)
        stated, history = rank.stated(), train(rank, SAVED_AT, STEPS)
        rank.engine.close()
        return stated, history

    results = run_world(grid, program)
    found = whole_state((pieces for (pieces, _), _ in results), results[0][0][1])
    assert found.keys() == stored.keys()
    assert all(torch.equal(bits_of(values), bits_of(stored[key])) for key, values in found.items())
    histories = [history for _, history in results]
    assert mean_losses(histories) == pytest.approx(mean_losses(unbroken), rel=1e-5)  # the same samples in other sums
    if grid == SAVING_GRID:
        assert histories == unbroken
