"""A checkpoint saved in one world is loaded in any other, bit for bit, and no rank reads more than it needs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.small_engine import ROWS, Job, ModelShape, Rank
from harness.small_state import Gathering
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.checkpoint.engine_state import EngineState
from megatron_zpp.checkpoint.folders import iteration_folder
from megatron_zpp.checkpoint.manifest import CHUNK_BYTES, ELEMENT_BYTES, ELEMENT_TYPE, CheckpointError
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.zero.pieces import owned_pieces, parameters

pytestmark = pytest.mark.virtual

SHAPE = ModelShape(is_tied=False)
ITERATION = 2
Full = dict[tuple[str, str], Tensor]


def saved(directory: Path, shape: tuple[int, int], row: str, *, with_moments: bool = True, chunk_bytes: int = CHUNK_BYTES) -> Full:
    """A checkpoint of an engine after two steps, and its full state."""
    gathering = Gathering(shape[0] * shape[1])

    def program(backend: VirtualBackend) -> list[tuple[str, str, int, Tensor]]:
        rank = Rank(Job(ROWS[row], shape=SHAPE, steps=ITERATION), backend)
        rank.train()
        saver = CheckpointSaver(
            directory, EngineState(rank.engine).share(with_moments=with_moments), SaveOptions(), gathering.of(backend.rank)
        )
        saver.save(
            replace(EngineState(rank.engine).manifest(Progress(ITERATION, 96, 96), {}, with_moments=with_moments), chunk_bytes=chunk_bytes)
        )
        return own(rank)

    return whole(run_world(shape, program))


def loaded(directory: Path, shape: tuple[int, int], row: str, *, with_moments: bool = True) -> tuple[Full, list[int], list[int]]:
    """The full state of an engine that loaded the checkpoint, and for each rank the bytes read and the number of steps."""

    def program(backend: VirtualBackend) -> tuple[list[tuple[str, str, int, Tensor]], int, int]:
        rank = Rank(Job(ROWS[row], shape=SHAPE), backend)
        with CheckpointReader(iteration_folder(directory, ITERATION)) as reader:
            EngineState(rank.engine).load(reader, with_moments=with_moments)
            return own(rank), reader.bytes_read, rank.engine.optimizer.steps

    results = run_world(shape, program)
    return whole([pieces for pieces, _, _ in results]), [nbytes for _, nbytes, _ in results], [steps for _, _, steps in results]


def own(rank: Rank) -> list[tuple[str, str, int, Tensor]]:
    return [(piece.parameter, piece.state, piece.start, piece.values.clone()) for piece in owned_pieces(rank.engine)]


def whole(by_rank: list[list[tuple[str, str, int, Tensor]]]) -> Full:
    parts: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
    for name, state, start, values in (piece for pieces in by_rank for piece in pieces):
        parts.setdefault((name, state), []).append((start, values))
    return {key: torch.cat([values for _, values in sorted(of_key, key=lambda part: part[0])]) for key, of_key in parts.items()}


def same(one: Full, other: Full) -> bool:
    return one.keys() == other.keys() and all(torch.equal(values, other[key]) for key, values in one.items())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Full]:
    directory = tmp_path_factory.mktemp("saved")
    return directory, saved(directory, (2, 2), "stage 3")


@pytest.mark.parametrize("row", list(ROWS))
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 2), (2, 2)], ids=str)
def test_weights_and_moments_are_the_same_bits_in_every_world_and_at_every_stage(
    checkpoint: tuple[Path, Full], shape: tuple[int, int], row: str
) -> None:
    directory, state = checkpoint
    found, _, steps = loaded(directory, shape, row)
    assert same(found, state)
    assert all(values.any() for (_, kind), values in found.items() if kind != "weight")
    assert set(steps) == {ITERATION}


@pytest.mark.parametrize("row", list(ROWS))
def test_every_stage_saves_the_same_state(tmp_path: Path, row: str) -> None:
    state = saved(tmp_path, (1, 2), row)
    assert same(loaded(tmp_path, (3, 1), "stage 3")[0], state)


def test_weights_alone_leave_the_optimizer_fresh(tmp_path: Path, checkpoint: tuple[Path, Full]) -> None:
    state = saved(tmp_path, (1, 2), "stage 1", with_moments=False)
    found, _, steps = loaded(tmp_path, (1, 2), "stage 3", with_moments=False)
    weights = {key for key in found if key[1] == "weight"}
    assert all(torch.equal(found[key], state[key]) for key in weights)
    assert not any(found[key].any() for key in found.keys() - weights) and set(steps) == {0}
    with pytest.raises(CheckpointError, match="holds no optimizer state; give --no-load-optim or --finetune"):
        loaded(tmp_path, (1, 1), "stage 0")


@pytest.mark.parametrize(("shape", "row"), [((1, 1), "stage 0"), ((2, 2), "stage 3"), ((3, 2), "stage 1")], ids=str)
def test_each_rank_reads_only_the_bytes_that_it_keeps(tmp_path: Path, shape: tuple[int, int], row: str) -> None:
    """Besides its own elements a rank reads headers, and the rest of a chunk at the ends of its ranges."""
    saved(tmp_path, (2, 2), "stage 3", chunk_bytes=64)
    with CheckpointReader(iteration_folder(tmp_path, ITERATION)) as reader:
        pieces, headers = len(reader.manifest.pieces), sum(file.header_bytes + 64 for file in reader.manifest.files)
        state_bytes = sum(map(math.prod, reader.manifest.shapes.values())) * 3 * ELEMENT_BYTES[ELEMENT_TYPE]
    for nbytes in loaded(tmp_path, shape, row)[1]:
        kept = state_bytes if row == "stage 0" else _largest_share(shape, row)
        assert nbytes <= kept + headers + 2 * 64 * 3 * pieces
        assert row == "stage 0" or kept < state_bytes / 2


def _largest_share(shape: tuple[int, int], row: str) -> int:
    def program(backend: VirtualBackend) -> int:
        rank = Rank(Job(ROWS[row], shape=SHAPE), backend)
        return sum(piece.values.nbytes for piece in owned_pieces(rank.engine))

    return max(run_world(shape, program))


def test_the_manifest_names_every_parameter_with_its_shape(checkpoint: tuple[Path, Full]) -> None:
    def shapes(backend: VirtualBackend) -> dict[str, tuple[int, ...]]:
        return {placed.spec.name: placed.spec.shape for placed in parameters(Rank(Job(shape=SHAPE), backend).engine)}

    with CheckpointReader(iteration_folder(checkpoint[0], ITERATION)) as reader:
        assert reader.manifest.shapes == run_world((1, 1), shapes)[0]
        assert reader.manifest.topology == {"world_size": 4, "ranks_per_node": 2, "partition_ranks": 2, "tensor_ranks": 1}
