"""Checkpoints of runs that keep a copy of the weights across steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from harness.codes import lean
from harness.small_engine import LEARNING_RATE, Job, ModelShape, Rank
from harness.small_state import Gathering
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.checkpoint.engine_state import EngineState
from megatron_zpp.checkpoint.folders import iteration_folder
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.zero.policy import (
    KEPT_WEIGHT,
    Policy,
)

pytestmark = pytest.mark.virtual

SAVED_AT, STEPS = 2, 4
History = list[tuple[float, float]]


def row(stage: int) -> Policy:
    return lean(stage, bits=2)


def job(stage: int) -> Job:
    return Job(row(stage), torch.bfloat16, ModelShape((17,), is_tied=False), STEPS, block_numel=256)


def train(rank: Rank, first: int, last: int) -> History:
    history = []
    for step in range(first, last):
        loss = rank.loss(step)
        rank.backward(loss)
        history.append((loss.item(), rank.engine.step(LEARNING_RATE).grad_norm))
    return history


def save(rank: Rank, directory: Path, gathering: Gathering, *, in_background: bool = False) -> CheckpointSaver:
    options = SaveOptions(in_background=in_background)
    saver = CheckpointSaver(directory, EngineState(rank.engine).share(with_moments=True), options, gathering.of(rank.backend.rank))
    rank.engine.finish_differences()
    saver.save(EngineState(rank.engine).manifest(Progress(SAVED_AT, 96, 96), {}, with_moments=True))
    saver.wait_for_copy()
    return saver


def through(directory: Path, stage: int, world: tuple[int, int], *, in_background: bool = False) -> list[History]:
    """The histories of a run that saves after SAVED_AT steps and goes on."""
    gathering = Gathering(world[0] * world[1])

    def program(backend: VirtualBackend) -> History:
        rank = Rank(job(stage), backend)
        history = train(rank, 0, SAVED_AT)
        saver = save(rank, directory, gathering, in_background=in_background)
        history += train(rank, SAVED_AT, STEPS)
        saver.finish()
        rank.engine.close()
        return history

    return run_world(world, program)


def loaded(directory: Path, stage: int, backend: VirtualBackend, *, with_copies: bool = True) -> Rank:
    rank = Rank(job(stage), backend)
    rank.engine.start_iteration(SAVED_AT)
    with CheckpointReader(iteration_folder(directory, SAVED_AT)) as reader:
        EngineState(rank.engine).load(reader, with_moments=True, with_copies=with_copies)
    return rank


SavedRun = Callable[[int], tuple[Path, list[History]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """The folder and the histories of the run of a stage that saves. Tests that look at the same run share it."""

    @cache
    def run(stage: int) -> tuple[Path, list[History]]:
        folder = tmp_path_factory.mktemp("saved")
        return folder, through(folder, stage, (2, 2), in_background=stage == 3)

    return run


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(saved: SavedRun, stage: int) -> None:
    folder, unbroken = saved(stage)

    def program(backend: VirtualBackend) -> History:
        rank = loaded(folder, stage, backend)
        history = train(rank, SAVED_AT, STEPS)
        rank.engine.close()
        return history

    assert run_world((2, 2), program) == [history[SAVED_AT:] for history in unbroken]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_first_step_of_a_resumed_run_fetches_whole_weights_like_that_of_any_run_and_the_next_differences(
    saved: SavedRun, stage: int
) -> None:
    def weight_bytes(rank: Rank, first: int) -> list[Traffic]:
        found = [Traffic()]
        for step in (first, first + 1):
            train(rank, step, step + 1)
            found.append(rank.ledger.total(Category.WEIGHTS))
        rank.engine.close()
        return [found[1], found[2] - found[1]]

    folder, _ = saved(stage)
    new = run_world((2, 2), lambda backend: weight_bytes(Rank(job(stage), backend), 0))
    resumed = run_world((2, 2), lambda backend: weight_bytes(loaded(folder, stage, backend), SAVED_AT))
    assert resumed == new
    assert all(first.inter_bytes > 2 * second.inter_bytes > 0 for first, second in resumed)


def test_a_save_changes_no_bit_of_the_run(saved: SavedRun) -> None:
    def program(backend: VirtualBackend) -> History:
        rank = Rank(job(3), backend)
        history = train(rank, 0, STEPS)
        rank.engine.close()
        return history

    assert saved(3)[1] == run_world((2, 2), program)


Copies = dict[str, list[tuple[int, Tensor]]]


def copies(rank: Rank) -> Copies:
    """The elements of each parameter in the own slice of its kept copy."""
    rank.engine.finish_differences()
    found: Copies = {}
    for unit in rank.engine.units:
        assert unit.kept is not None
        for segment in unit.layout.segments(rank.engine.links.own_slice, 1):
            values = unit.kept.own.range(segment.offset, segment.offset + segment.stop - segment.start).clone()
            found.setdefault(segment.spec.name, []).append((segment.start, values))
    return found


def whole(of_ranks: list[Copies]) -> dict[str, Tensor]:
    parts: Copies = {}
    for of_rank in of_ranks:
        for name, pieces in of_rank.items():
            parts.setdefault(name, []).extend(pieces)
    return {name: torch.cat([values for _, values in sorted(pieces, key=lambda piece: piece[0])]) for name, pieces in parts.items()}


@pytest.mark.parametrize(("world", "stage"), [((3, 2), 3), ((3, 1), 2), ((2, 2), 1)], ids=str)
def test_any_world_and_stage_begins_with_the_stored_copies(tmp_path: Path, world: tuple[int, int], stage: int) -> None:
    gathering = Gathering(4)

    def saving(backend: VirtualBackend) -> Copies:
        rank = Rank(job(3), backend)
        train(rank, 0, SAVED_AT)
        save(rank, tmp_path, gathering)
        found = copies(rank)
        rank.engine.close()
        return found

    def loading(backend: VirtualBackend, *, with_copies: bool) -> Copies:
        rank = loaded(tmp_path, stage, backend, with_copies=with_copies)
        found = copies(rank)
        rank.engine.close()
        return found

    stored = whole(run_world((2, 2), saving))
    found = whole(run_world(world, lambda backend: loading(backend, with_copies=True)))
    anew = whole(run_world(world, lambda backend: loading(backend, with_copies=False)))
    assert found.keys() == stored.keys() and all(torch.equal(values, stored[name]) for name, values in found.items())
    assert not all(torch.equal(values, stored[name]) for name, values in anew.items())


def test_a_world_of_one_node_loads_the_checkpoint_without_its_copies(saved: SavedRun) -> None:
    def program(backend: VirtualBackend) -> History:
        rank = loaded(saved(3)[0], 3, backend)
        history = train(rank, SAVED_AT, STEPS)
        rank.engine.close()
        return history

    assert all(norm > 0 for history in run_world((1, 2), program) for _, norm in history)


def test_the_copies_have_the_working_dtype_in_the_manifest(saved: SavedRun) -> None:
    with CheckpointReader(iteration_folder(saved(2)[0], SAVED_AT)) as reader:
        assert reader.manifest.states == {"weight": "F32", "exp_avg": "F32", "exp_avg_sq": "F32", KEPT_WEIGHT: "BF16"}
        assert reader.read("final.norm.weight", KEPT_WEIGHT, 0, 12).dtype is torch.bfloat16


def test_weights_alone_are_saved_without_copies() -> None:
    def program(backend: VirtualBackend) -> set[str]:
        rank = Rank(dataclasses.replace(job(3), steps=1), backend)
        share = EngineState(rank.engine).share(with_moments=False)
        rank.engine.close()
        return {piece.state for piece in share.pieces}

    assert set().union(*run_world((2, 2), program)) == {"weight"}
