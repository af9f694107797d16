"""Collects the state of an engine for a checkpoint, and loads it from one, for any world size and ZeRO stage."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from megatron_zpp import __version__
from megatron_zpp.checkpoint.contents import check_moments
from megatron_zpp.checkpoint.manifest import ELEMENT_TYPE, INNER_WEIGHT, Manifest, of_island
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import Share
from megatron_zpp.checkpoint.shard_file import ELEMENT_TYPES
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.pieces import Piece, owned_pieces, parameters, resting_pieces
from megatron_zpp.zero.policy import KEPT_WEIGHT, MOMENTS, WEIGHT


class EngineState:
    """The state of an engine as checkpoints have it. with_moments: with Adam's moments, and the copies kept across steps."""

    def __init__(self, engine: ZeroEngine) -> None:
        self.engine = engine

    def share(self, *, with_moments: bool) -> Share:
        """What this rank writes into every checkpoint: the primary slices it owns. Call engine.finish_differences() before each save."""
        pieces = [piece for piece in owned_pieces(self.engine) if with_moments or piece.state == WEIGHT]
        return Share(self.engine.rank, self.engine.world_size, pieces)

    def manifest(self, progress: Progress, flags: Mapping[str, Any], *, with_moments: bool) -> Manifest:
        """The manifest of the current state, without files and pieces. Every rank must call it.

        flags: the resolved configuration by group, and the padded vocabulary.
        """
        engine = self.engine
        engine.finish_updates()
        grid = engine.links.grid
        states = dict.fromkeys((WEIGHT, *MOMENTS) if with_moments else (WEIGHT,), ELEMENT_TYPE)
        if with_moments and engine.keeps_copies:
            states[KEPT_WEIGHT] = ELEMENT_TYPES[engine.options.dtype]
        return Manifest(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            shapes={param.spec.name: param.spec.whole_shape for param in parameters(engine)},
            states=states,
            run={
                "scheduled_samples": progress.scheduled_samples,
                "ordered_samples": progress.ordered_samples,
                **_what_was_read(progress),
                **optimizer_state(engine),
                **_frozen(engine),
            },
            flags=flags,
            topology={
                "world_size": grid.world_size,
                "ranks_per_node": grid.ranks_per_node,
                "partition_ranks": grid.partition_ranks,
                "tensor_ranks": grid.tensor_ranks,
            },
            versions=versions(),
        )

    def load(self, reader: CheckpointReader, *, with_moments: bool, with_copies: bool = False) -> None:
        """Loads main weights, and with_moments also the optimizer and the loss scaler. Every rank must call it.

        with_copies: also the copies of the weights that the engine keeps across steps, if it keeps any. Otherwise they start anew from the
        main weights.
        Raises CheckpointError if the checkpoint has no moments, and DamagedCheckpointError if elements are missing or bytes have changed.
        """
        self.fill(reader, with_moments=with_moments, with_copies=with_copies)
        self.resume(reader, with_moments=with_moments, with_copies=with_copies)

    def fill(self, reader: CheckpointReader, *, with_moments: bool, with_copies: bool = False) -> None:
        """The first half of `load`, which reads the files. Parameters that the checkpoint does not have are left as they are.

        From a checkpoint of islands an engine takes the mean of their inner weights and moments, or without moments the outer weights.
        """
        wanted = [WEIGHT]
        if with_moments:
            check_moments(reader.folder, reader.manifest)
            wanted += MOMENTS
        if with_copies:
            wanted.append(KEPT_WEIGHT)
        shapes = reader.manifest.shapes
        pieces = [piece for piece in resting_pieces(self.engine) if piece.state in wanted and piece.parameter in shapes]
        if not (with_moments and reader.manifest.islands):
            reader.fill(pieces)
            return
        frozen = reader.manifest.frozen
        reader.fill(piece for piece in pieces if piece.parameter in frozen)
        for state in wanted:  # one after the other, for a mean takes memory
            of_state = [piece for piece in pieces if piece.state == state and piece.parameter not in frozen]
            _fill_from_islands(reader, of_state, state, self._stored_island(reader))

    def resume(self, reader: CheckpointReader, *, with_moments: bool, with_copies: bool = False) -> None:
        """The second half of `load`, which reads no files, so that a rank does it if all have done the first."""
        if with_moments:
            done = self._done(reader)
            self.engine.optimizer.resume(done["optimizer_steps"], done.get("unused_steps", {}))
            self.engine.loss_scaler.load_state(done["loss_scaler"])
        self.engine.weights_changed(copies_are_filled=with_copies)

    def _done(self, reader: CheckpointReader) -> Mapping[str, Any]:
        """What the optimizer has done in the stored run; of other islands than here, in the one with the smallest loss scale."""
        run, island = reader.manifest.run, self._stored_island(reader)
        islands: Sequence[Mapping[str, Any]] = run["islands"] if reader.manifest.islands else [run]
        return min(islands, key=lambda done: float(done["loss_scaler"].get("scale", 1.0))) if island is None else islands[island]

    def _stored_island(self, reader: CheckpointReader) -> int | None:
        """Which of the islands of the checkpoint the engine goes on as. None: as the mean of all, if it has any."""
        return None


def optimizer_state(engine: ZeroEngine) -> dict[str, Any]:
    """What the optimizer has done, and the loss scale. unused_steps: the updates that have passed parameters over, if there are any."""
    unused = engine.optimizer.unused_steps
    state = {"optimizer_steps": engine.optimizer.steps, **({"unused_steps": unused} if unused else {})}
    return {**state, "loss_scaler": engine.loss_scaler.state()}


def _frozen(engine: ZeroEngine) -> dict[str, Any]:
    """The parameters that have no optimizer state, if there are any."""
    frozen = [placed.spec.name for unit in engine.units if not unit.trains for placed in unit.layout.params]
    return {"frozen": frozen} if frozen else {}


def _what_was_read(progress: Progress) -> dict[str, Any]:
    """Tokens and data of the run; empty if the readings are not known, because a reader then derives the tokens from the flags."""
    if not progress.readings:
        return {}
    return {
        "consumed_tokens": progress.consumed_tokens,
        "scheduled_tokens": progress.scheduled_tokens,
        "readings": [asdict(reading) for reading in progress.readings],
    }


def versions() -> dict[str, str]:
    """The versions of the programs that write a checkpoint."""
    return {"megatron_zpp": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _fill_from_islands(reader: CheckpointReader, pieces: Sequence[Piece], state: str, island: int | None) -> None:
    """Fills pieces of one state from that of an island, or with the fp32 mean over all islands."""
    stored = INNER_WEIGHT if state == WEIGHT else state
    first, *others = range(reader.manifest.islands) if island is None else [island]
    reader.fill(replace(piece, state=of_island(stored, first)) for piece in pieces)
    for other in others:
        added = [torch.empty_like(piece.values) for piece in pieces]
        reader.fill(replace(piece, state=of_island(stored, other), values=values) for piece, values in zip(pieces, added, strict=True))
        for piece, values in zip(pieces, added, strict=True):
            piece.values.add_(values)
    for piece in pieces if others else ():
        piece.values.div_(1 + len(others))
