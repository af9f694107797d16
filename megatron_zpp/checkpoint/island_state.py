"""Collects the state of islands for one checkpoint of all of them, and loads it.

The weight of such a checkpoint is the outer weight. Inner weights and moments are states of their own for every island.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_zpp.checkpoint.engine_state import EngineState, optimizer_state
from megatron_zpp.checkpoint.manifest import ELEMENT_TYPE, INNER_WEIGHT, Manifest, of_island
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import Share
from megatron_zpp.checkpoint.shard_file import ELEMENT_TYPES
from megatron_zpp.outer.pieces import OUTER_COPY, OUTER_MOMENTUM, owned_outer_pieces, resting_outer_pieces
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.zero.alike import texts_of_ranks
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.policy import MOMENTS, WEIGHT


class IslandState(EngineState):
    """The state of one island and of the outer steps that join it with the others."""

    def __init__(self, outer: OuterSteps) -> None:
        super().__init__(outer.engine)
        self._outer = outer

    def share(self, *, with_moments: bool) -> Share:
        """What this rank writes: its parts of the outer states, and its slices of those of its island.

        Without moments only outer weights, and the frozen ones.
        """
        outer, engine, share = self._outer, self.engine, super().share(with_moments=with_moments)
        trained = {placed.spec.name for unit in engine.trained for placed in unit.layout.params}
        pieces = [piece for piece in owned_outer_pieces(outer) if with_moments or piece.state == WEIGHT]
        for piece in share.pieces:
            if piece.parameter not in trained:
                pieces += [piece] if outer.island == 0 else []
            elif with_moments:
                pieces.append(replace(piece, state=of_island(INNER_WEIGHT if piece.state == WEIGHT else piece.state, outer.island)))
        return Share(outer.everyone.rank, outer.islands * engine.world_size, pieces)

    def manifest(self, progress: Progress, flags: Mapping[str, Any], *, with_moments: bool) -> Manifest:
        outer, engine = self._outer, self.engine
        outer.check_stepped()
        outer.check_open()  # waits for what crosses: it changes the outer weights
        manifest = super().manifest(progress, flags, with_moments=with_moments)
        manifest = replace(manifest, topology={**manifest.topology, "world_size": outer.islands * engine.world_size})
        if not with_moments:
            return manifest
        states = {WEIGHT: ELEMENT_TYPE, OUTER_MOMENTUM: ELEMENT_TYPE, OUTER_COPY: ELEMENT_TYPES[engine.options.dtype]}
        for island in range(outer.islands):
            states |= dict.fromkeys((of_island(state, island) for state in (INNER_WEIGHT, *MOMENTS)), ELEMENT_TYPE)
        own = json.dumps(optimizer_state(engine))
        islands = [json.loads(text) for text in texts_of_ranks(outer.links.backend, engine.device, own)]
        late = outer.late_parameters
        run = {**manifest.run, "islands": islands, **({"late_parameters": late} if late else {})}
        return replace(manifest, states=states, run=run, topology={**manifest.topology, "islands": outer.islands})

    def fill(self, reader: CheckpointReader, *, with_moments: bool, with_copies: bool = False) -> None:
        """An island goes on as the stored one of its number.

        If the checkpoint has another number of islands, each starts with the mean of their inner weights and moments; if it has none, or
        without moments, with its weights and no outer momentum.
        """
        super().fill(reader, with_moments=with_moments, with_copies=with_copies)
        if with_moments and reader.manifest.islands:
            reader.fill(resting_outer_pieces(self._outer))

    def resume(self, reader: CheckpointReader, *, with_moments: bool, with_copies: bool = False) -> None:
        super().resume(reader, with_moments=with_moments, with_copies=with_copies)
        run, has_outer = reader.manifest.run, with_moments and reader.manifest.islands > 0
        self._outer.resume(from_inner=not has_outer, late_parameters=run.get("late_parameters", ()))

    def _stored_island(self, reader: CheckpointReader) -> int | None:
        return self._outer.island if reader.manifest.islands == self._outer.islands else None


def state_of(engine: ZeroEngine, outer: OuterSteps | None) -> EngineState:
    """The state that is saved and loaded: that of an engine, or of islands that are joined."""
    return EngineState(engine) if outer is None else IslandState(outer)
