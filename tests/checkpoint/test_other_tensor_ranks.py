"""What tensor ranks have saved is loaded by any other number of them, in any world and stage, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.codes import lean
from harness.divided_model import DividedRank, History, State, Stated, bits_of, whole_state
from harness.small_engine import LEARNING_RATE, Job, ModelShape, mean_losses
from harness.small_state import Gathering
from harness.worlds import run_world

from megatron_zpp.checkpoint.engine_state import EngineState
from megatron_zpp.checkpoint.folders import iteration_folder
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import Code
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import (
    KEPT_WEIGHT,
    MOMENTS,
    POLICIES,
    WEIGHT,
    Policy,
    with_gradients_summed_on_secondary,
    with_weight_differences,
)

pytestmark = pytest.mark.virtual

SAVED_AT, STEPS = 2, 3
SAVING_GRID = Grid.of_nodes(2, 4, tensor_ranks=2)
SHAPE = ModelShape((48, 16))  # up to 8 ranks share each block
LEAN = with_gradients_summed_on_secondary(lean(3, bits=2))
LEAN_1 = with_weight_differences(POLICIES[1], Code.gaussian(2, rounds=1))


def rank_of(policy: Policy, backend: VirtualBackend, dtype: torch.dtype = torch.float32) -> DividedRank:
    """Two groups of channels, so that four ranks hold each key in pairs, and eight in fours."""
    return DividedRank(Job(policy, dtype, SHAPE, STEPS, block_numel=256), backend)


def train(rank: DividedRank, first: int, last: int) -> History:
    history = []
    for step in range(first, last):
        loss = rank.accumulate(step)
        history.append((loss, rank.engine.step(LEARNING_RATE).grad_norm))
    return history


def save(rank: DividedRank, directory: Path, gathering: Gathering, *, in_background: bool) -> CheckpointSaver:
    options = SaveOptions(in_background=in_background)
    saver = CheckpointSaver(directory, EngineState(rank.engine).share(with_moments=True), options, gathering.of(rank.backend.rank))
    rank.engine.finish_differences()
    saver.save(EngineState(rank.engine).manifest(Progress(SAVED_AT, 96, 96), {}, with_moments=True))
    saver.wait_for_copy()
    return saver


def load(rank: DividedRank, directory: Path) -> None:
    rank.engine.start_iteration(SAVED_AT)
    with CheckpointReader(iteration_folder(directory, SAVED_AT)) as reader:
        EngineState(rank.engine).load(reader, with_moments=True, with_copies=rank.engine.keeps_copies)


def through(
    directory: Path, policy: Policy, dtype: torch.dtype = torch.float32, grid: Grid = SAVING_GRID, *, in_background: bool = False
) -> tuple[State, list[History]]:
    """The state after SAVED_AT steps, which the run saves, and the histories of the steps to its end."""
    gathering = Gathering(grid.world_size)

    def program(backend: VirtualBackend) -> tuple[Stated, History]:
        rank = rank_of(policy, backend, dtype)
        train(rank, 0, SAVED_AT)
        saver = save(rank, directory, gathering, in_background=in_background)
        stated = rank.stated()
        history = train(rank, SAVED_AT, STEPS)
        saver.finish()
        rank.engine.close()
        return stated, history

    results = run_world(grid, program)
    return whole_state((pieces for (pieces, _), _ in results), results[0][0][1]), [history for _, history in results]


def resumed(
    directory: Path, policy: Policy, grid: Grid, dtype: torch.dtype = torch.float32, last: int = STEPS
) -> tuple[State, list[History]]:
    """The state that a run finds, and its histories from there to step `last`."""

    def program(backend: VirtualBackend) -> tuple[Stated, History]:
        rank = rank_of(policy, backend, dtype)
        load(rank, directory)
        rank.engine.finish_differences()
        stated = rank.stated()
        history = train(rank, SAVED_AT, last)
        rank.engine.close()
        return stated, history

    results = run_world(grid, program)
    return whole_state((pieces for (pieces, _), _ in results), results[0][0][1]), [history for _, history in results]


def assert_equal(found: State, stored: State, states: set[str]) -> None:
    assert {state for _, state in found} == states
    for key, values in found.items():
        assert torch.equal(bits_of(values), bits_of(stored[key])), key


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, list[History]]:
    directory = tmp_path_factory.mktemp("saved")
    return directory, *through(directory, POLICIES[3], in_background=True)


WORLDS = [
    (Grid.of_nodes(1, 1), 0),
    (Grid.of_nodes(2, 2), 3),
    (Grid.of_nodes(1, 3), 1),
    (SAVING_GRID, 3),
    (SAVING_GRID, 0),
    (Grid.of_nodes(3, 2, tensor_ranks=2), 2),
    (Grid.of_nodes(2, 4, tensor_ranks=4), 1),
    (Grid.of_nodes(1, 4, tensor_ranks=4), 3),
    (Grid.of_nodes(1, 8, tensor_ranks=8), 2),
]


@pytest.mark.parametrize("grid, stage", WORLDS, ids=str)
def test_any_number_of_tensor_ranks_finds_the_weights_and_moments_that_two_have_saved(
    saved: tuple[Path, State, list[History]], grid: Grid, stage: int
) -> None:
    directory, stored, unbroken = saved
    found, histories = resumed(directory, POLICIES[stage], grid)
    assert_equal(found, stored, {WEIGHT, *MOMENTS})
    # The same samples in other sums: over tensor ranks, and over data ranks that have more or fewer of them.
    assert mean_losses(histories) == pytest.approx(mean_losses(unbroken), rel=1e-5)
    if grid == SAVING_GRID:
        assert histories == unbroken


def test_every_rank_has_a_file_of_its_own_and_all_of_them_have_each_element_once(saved: tuple[Path, State, list[History]]) -> None:
    directory, stored, _ = saved
    folder = iteration_folder(directory, SAVED_AT)
    with CheckpointReader(folder) as reader:
        manifest = reader.manifest
        assert [file.name for file in manifest.files] == [f"rank_{rank:05d}.safetensors" for rank in range(SAVING_GRID.world_size)]
        assert sorted(path.name for path in folder.glob("*.safetensors")) == [file.name for file in manifest.files]
        assert manifest.topology == {"world_size": 8, "ranks_per_node": 4, "partition_ranks": 2, "tensor_ranks": 2}
        assert sum(piece.stop - piece.start for piece in manifest.pieces) == sum(
            torch.Size(shape).numel() for shape in manifest.shapes.values()
        )
        assert list(reader.verify()) == []
        for (name, state), values in stored.items():
            assert torch.equal(reader.read(name, state, 0, values.numel()), values.view(-1))


@pytest.mark.parametrize("policy", [LEAN, LEAN_1], ids=["lean", "differences, stage 1"])
def test_a_run_of_tensor_ranks_with_kept_copies_resumes_with_its_bits_and_others_find_the_copies(tmp_path: Path, policy: Policy) -> None:
    grid = Grid.of_nodes(2, 4, tensor_ranks=4)  # pairs of ranks share a key
    stored, unbroken = through(tmp_path, policy, torch.bfloat16, grid)
    found, histories = resumed(tmp_path, policy, grid, torch.bfloat16)
    assert_equal(found, stored, {WEIGHT, KEPT_WEIGHT, *MOMENTS})
    assert histories == unbroken
    differs = [key for key, values in stored.items() if key[1] == KEPT_WEIGHT and not torch.equal(values.float(), stored[key[0], WEIGHT])]
    assert differs  # copies are not the weights
    for other, other_policy in ((Grid.of_nodes(2, 2), LEAN), (Grid.of_nodes(3, 2, tensor_ranks=2), LEAN_1)):
        found, _ = resumed(tmp_path, other_policy, other, torch.bfloat16, SAVED_AT)
        assert_equal(found, stored, {WEIGHT, KEPT_WEIGHT, *MOMENTS})


def test_tensor_ranks_find_what_one_has_saved(tmp_path: Path) -> None:
    stored, unbroken = through(tmp_path, POLICIES[1], grid=Grid.of_nodes(2, 2))
    found, histories = resumed(tmp_path, POLICIES[3], SAVING_GRID)
    assert_equal(found, stored, {WEIGHT, *MOMENTS})
    assert mean_losses(histories) == pytest.approx(mean_losses(unbroken), rel=1e-5)
