"""The most memory that tensors of one rank of a virtual world take at once, while it trains by the flags of the training script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from harness.live_bytes import LiveBytes
from harness.small_engine import LEARNING_RATE, Job, Rank
from harness.worlds import TurnLanes, run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.lanes import Hop
from megatron_zpp.comm.staging import Staging
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.engine import ZeroEngine
from testbed.session import RankPlace, Session

CPU = torch.device("cpu")


class LiveStorages(LiveBytes):
    """Also knows when the engine makes the storages of its units empty or fills them again, which no operator shows."""

    def __init__(self) -> None:
        super().__init__()
        self._resizable: list[torch.UntypedStorage] = []
        self._counted = 0  # of these storages
        self._staging: Staging | None = None
        self.peak_beside_buffers = 0

    def begin(self, engine: ZeroEngine) -> None:
        """Forgets the peak so far. engine: made in the block."""
        self._resizable = [unit._full.untyped_storage() for unit in engine.units]
        self._counted = sum(unit._full.numel() * unit._full.itemsize for unit in engine.units)
        self._staging = engine.links.staging
        self.peak = self.peak_beside_buffers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.peak = self.peak, 0
        result = super().__torch_dispatch__(func, types, args, kwargs)
        resized = sum(storage.nbytes() for storage in self._resizable) - self._counted
        most = max(self.peak, self.now) + resized
        self.peak = max(before, most)
        if self._staging is not None:
            self.peak_beside_buffers = max(self.peak_beside_buffers, most - self._staging.allocated_bytes)
        return result


class LiveLanes(TurnLanes):
    """Lanes whose thread makes tensors that count, too."""

    def __init__(self, live: LiveStorages) -> None:
        super().__init__()
        self._live = live

    def submit(self, hop: Hop) -> None:
        hop.prepare, hop.launch, hop.land = map(self._counted, (hop.prepare, hop.launch, hop.land))
        super().submit(hop)

    def _counted(self, call: Callable[[], Any]) -> Callable[[], Any]:
        def called() -> Any:
            with self._live:
                return call()

        return called


@dataclass(frozen=True)
class Held:
    """Bytes of one rank. states: of weights, gradients and optimizer, at the end of the last backward.

    staging: of the buffers of payloads, whose number depends on what the links carry at the same time. peak_beside_buffers: without them.
    """

    peak: int
    peak_beside_buffers: int
    states: int
    staging: int


def held_in_steps(
    live: LiveStorages, engine: ZeroEngine, accumulate: Callable[[int], object], update: Callable[[], object], close: Callable[[], object]
) -> Held:
    """Of two steps. The peak is that of the second. accumulate: all of forward and backward."""
    accumulate(0)
    update()
    live.begin(engine)
    accumulate(1)
    states = engine.state_bytes().device
    update()
    close()
    return Held(live.peak, live.peak_beside_buffers, states, engine.links.staging.allocated_bytes)


def held_by_ranks(flags: str, grid: Grid, after_step: Callable[[Session], None] = lambda session: None) -> list[Held]:
    """By rank."""

    def program(backend: VirtualBackend) -> Held:
        with LiveStorages() as live:
            session = Session(flags, RankPlace(backend, LiveLanes(live), CPU))

            def update() -> None:
                session.engine.update(LEARNING_RATE)
                after_step(session)

            return held_in_steps(live, session.engine, session.forward_backward, update, session.close)

    return run_world(grid, program)


def held_by_small_ranks(job: Job, grid: Grid) -> list[Held]:
    """The same of the small model, by rank."""

    def program(backend: VirtualBackend) -> Held:
        with LiveStorages() as live:
            rank = Rank(job, backend, lanes=LiveLanes(live))

            def accumulate(step: int) -> None:
                rank.accumulate(step)
                rank.engine.finish_gradients()

            return held_in_steps(live, rank.engine, accumulate, lambda: rank.engine.step(LEARNING_RATE), rank.engine.close)

    return run_world(grid, program)
