"""Collects the state of an engine for a checkpoint, and loads it from one, for any world size and ZeRO stage."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_zpp import __version__
from megatron_zpp.checkpoint.contents import check_moments
from megatron_zpp.checkpoint.manifest import ELEMENT_TYPE, Manifest
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import Share
from megatron_zpp.checkpoint.shard_file import ELEMENT_TYPES
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.pieces import owned_pieces, parameters, resting_pieces
from megatron_zpp.zero.states import KEPT_WEIGHT, MOMENTS, WEIGHT


@dataclass(frozen=True)
class RunState:
    """What goes into the manifest apart from the engine's own state.

    iteration: the steps done. consumed_samples: of all steps. scheduled_samples: of those that were not skipped; learning rate and weight
    decay follow them. flags: the resolved configuration by group, and the padded vocabulary.
    ordered_samples: samples of the training data that the run put in order; 0 if that is not known.
    """

    iteration: int
    consumed_samples: int
    scheduled_samples: int
    flags: Mapping[str, Any]
    ordered_samples: int = 0


def share_of(engine: ZeroEngine, *, with_moments: bool) -> Share:
    """What this rank writes into every checkpoint: the primary slices it owns. Call engine.finish_differences() before each save.

    with_moments: also Adam's moments, and the copies that the engine keeps across steps.
    """
    pieces = [piece for piece in owned_pieces(engine) if with_moments or piece.state == WEIGHT]
    return Share(engine.rank, engine.world_size, pieces)


def manifest_of(engine: ZeroEngine, state: RunState, *, with_moments: bool) -> Manifest:
    """The manifest of the engine's current state, without files and pieces."""
    engine.finish_updates()
    grid = engine.ladder.grid
    states = dict.fromkeys((WEIGHT, *MOMENTS) if with_moments else (WEIGHT,), ELEMENT_TYPE)
    if with_moments and engine.keeps_copies:
        states[KEPT_WEIGHT] = ELEMENT_TYPES[engine.dtype]
    return Manifest(
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        shapes={param.spec.name: param.spec.whole_shape for param in parameters(engine)},
        states=states,
        run={
            "scheduled_samples": state.scheduled_samples,
            "ordered_samples": state.ordered_samples,
            "optimizer_steps": engine.optimizer.steps,
            "loss_scaler": engine.loss_scaler.state(),
        },
        flags=state.flags,
        topology={
            "world_size": grid.world_size,
            "ranks_per_node": grid.ranks_per_node,
            "partition_ranks": grid.partition_ranks,
            "tensor_ranks": grid.tensor_ranks,
        },
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """The versions of the programs that write a checkpoint."""
    return {"megatron_zpp": __version__, "torch": torch.__version__, "python": platform.python_version()}


def load_engine(engine: ZeroEngine, reader: CheckpointReader, *, with_moments: bool, with_copies: bool = False) -> None:
    """Loads the engine's main weights, and with_moments also the optimizer and the loss scaler. Every rank must call it.

    with_copies: also the copies of the weights that the engine keeps across steps, if it keeps any. Otherwise they start anew from the
    main weights.
    Raises CheckpointError if the checkpoint has no moments, and DamagedCheckpointError if elements are missing or bytes have changed.
    """
    wanted = {WEIGHT}
    if with_moments:
        check_moments(reader.folder, reader.manifest)
        wanted |= set(MOMENTS)
    if with_copies:
        wanted.add(KEPT_WEIGHT)
    reader.fill(piece for piece in resting_pieces(engine) if piece.state in wanted)
    if with_moments:
        engine.optimizer.steps = reader.manifest.run["optimizer_steps"]
        engine.loss_scaler.load_state(reader.manifest.run["loss_scaler"])
    engine.weights_changed(copies_are_filled=with_copies)
