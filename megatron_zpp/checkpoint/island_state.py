"""Collects the state of islands for one checkpoint of all of them, and loads it.

The weight of such a checkpoint is the outer weight. Inner weights and moments are states of their own for every island.
"""

from __future__ import annotations

import json
from dataclasses import replace

from megatron_zpp.checkpoint.engine_state import fill_engine, manifest_of, optimizer_state, resume_engine, share_of
from megatron_zpp.checkpoint.manifest import ELEMENT_TYPE, INNER_WEIGHT, Manifest, of_island
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import Share
from megatron_zpp.checkpoint.shard_file import ELEMENT_TYPES
from megatron_zpp.outer.pieces import OUTER_COPY, OUTER_MOMENTUM, owned_outer_pieces, resting_outer_pieces
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.zero.alike import texts_of_ranks
from megatron_zpp.zero.policy import MOMENTS, WEIGHT


def share_of_islands(outer: OuterSteps) -> Share:
    """What this rank writes into every checkpoint: its parts of the outer states, and its slices of those of its island."""
    engine, share = outer.engine, share_of(outer.engine, with_moments=True)
    trained = {placed.spec.name for unit in engine.trained for placed in unit.layout.params}
    pieces = list(owned_outer_pieces(outer))
    for piece in share.pieces:
        if piece.parameter in trained:
            pieces.append(replace(piece, state=of_island(INNER_WEIGHT if piece.state == WEIGHT else piece.state, outer.island)))
        elif outer.island == 0:
            pieces.append(piece)
    return Share(outer.everyone.rank, outer.islands * engine.world_size, pieces)


def manifest_of_islands(outer: OuterSteps, progress: Progress) -> Manifest:
    """The manifest of the current state, without files and pieces. Every rank must call it."""
    engine = outer.engine
    manifest = manifest_of(engine, progress, {}, with_moments=True)
    states = {WEIGHT: ELEMENT_TYPE, OUTER_MOMENTUM: ELEMENT_TYPE, OUTER_COPY: ELEMENT_TYPES[engine.options.dtype]}
    for island in range(outer.islands):
        states |= dict.fromkeys((of_island(state, island) for state in (INNER_WEIGHT, *MOMENTS)), ELEMENT_TYPE)
    own = json.dumps(optimizer_state(engine))
    islands = [json.loads(text) for text in texts_of_ranks(outer.links.backend, engine.device, own)]
    topology = {**manifest.topology, "world_size": outer.islands * engine.world_size, "islands": outer.islands}
    return replace(manifest, states=states, run={**manifest.run, "islands": islands}, topology=topology)


def fill_islands(outer: OuterSteps, reader: CheckpointReader, *, with_moments: bool) -> None:
    """Reads the files, and changes nothing else. Every rank must call it, then `resume_islands`.

    An island goes on as the stored one of its number. If the checkpoint has another number of islands, each starts with the mean of their
    inner weights and moments; if it has none, or without moments, with its weights and no outer momentum.
    """
    fill_engine(outer.engine, reader, with_moments=with_moments, with_copies=False, island=_stored_island(outer, reader))
    if with_moments and reader.manifest.islands:
        reader.fill(resting_outer_pieces(outer))


def resume_islands(outer: OuterSteps, reader: CheckpointReader, *, with_moments: bool) -> None:
    """Does what follows when all ranks have read the files."""
    resume_engine(outer.engine, reader, with_moments=with_moments, with_copies=False, island=_stored_island(outer, reader))
    outer.resume(from_inner=not (with_moments and reader.manifest.islands))


def _stored_island(outer: OuterSteps, reader: CheckpointReader) -> int | None:
    return outer.island if reader.manifest.islands == outer.islands else None
