"""Saving: every rank writes its own slices, rank 0 the manifest; the folder gets its name, and `latest` moves, when all are done."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_zpp.checkpoint.manifest import LATEST_FILE, MANIFEST_FILE, Manifest, StoredPiece, iteration_folder
from megatron_zpp.parallel.initialize import gather_texts
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.optimizer import MOMENTS
from megatron_zpp.zero.pieces import WEIGHT, Piece, owned_pieces, parameters


@dataclass(frozen=True)
class RunState:
    """What goes into the manifest beside the engine's own state."""

    iteration: int
    consumed_samples: int
    scheduled_samples: int
    flags: Mapping[str, Any]


def save_checkpoint(directory: Path, engine: ZeroEngine, state: RunState, *, with_moments: bool = True) -> Path:
    """The folder of the new checkpoint under `directory`; every rank must call it, and all see the same file system."""
    rank = engine.ladder.backend.rank
    final = iteration_folder(directory, state.iteration)
    unfinished = final.with_name(final.name + ".unfinished")
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    gather_texts("folder made")
    file = f"rank_{rank:05d}.safetensors"
    pieces = [piece for piece in owned_pieces(engine) if with_moments or piece.state == WEIGHT]
    _write_pieces(unfinished / file, pieces)
    stored = gather_texts(json.dumps(_stored(pieces, file)))
    if rank == 0:
        manifest = _manifest(engine, state, stored, with_moments)
        _write_durably(unfinished / MANIFEST_FILE, manifest.to_json())
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        move_latest(directory, state.iteration)
    gather_texts("saved")
    return final


def move_latest(directory: Path, iteration: int) -> None:
    """Points `latest` at `iteration`, in one step: a reader sees the old or the new one, never half a file."""
    temporary = directory / (LATEST_FILE + ".new")
    _write_durably(temporary, str(iteration))
    os.replace(temporary, directory / LATEST_FILE)


def _write_pieces(path: Path, pieces: Iterable[Piece]) -> None:
    save_file({f"{piece.parameter}.{piece.state}": piece.values.detach().cpu().clone() for piece in pieces}, path)
    os.chmod(path, 0o666 & ~_umask())  # safetensors makes files that only their owner can read
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _stored(pieces: Iterable[Piece], file: str) -> list[dict[str, Any]]:
    return [asdict(StoredPiece(piece.parameter, piece.start, piece.stop, file)) for piece in pieces if piece.state == WEIGHT]


def _manifest(engine: ZeroEngine, state: RunState, stored: list[str], with_moments: bool) -> Manifest:
    topology = engine.ladder.topology
    return Manifest(
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        shapes={param.spec.name: param.spec.shape for param in parameters(engine)},
        states=(WEIGHT, *MOMENTS) if with_moments else (WEIGHT,),
        pieces=tuple(StoredPiece(**piece) for text in stored for piece in json.loads(text)),
        run={
            "scheduled_samples": state.scheduled_samples,
            "optimizer_steps": engine.optimizer.steps,
            "loss_scaler": engine.loss_scaler.state(),
        },
        flags=state.flags,
        topology={"world_size": topology.world_size, "ranks_per_node": topology.ranks_per_node},
        versions={"torch": torch.__version__},
    )


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
