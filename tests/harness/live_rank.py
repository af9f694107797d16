"""The most memory that tensors of one rank of a virtual world take at once, while it trains by the flags of the training script."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu.session import RankPlace, Session
from torch import Tensor

from harness.live_bytes import LiveBytes
from harness.worlds import TurnLanes, run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.lanes import Hop
from megatron_zpp.parallel.grid import Grid

CPU = torch.device("cpu")


class LiveStorages(LiveBytes):
    """Counts storages by the sizes that they have from time to time; the engine frees weights by making theirs empty."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Callable[[], torch.UntypedStorage | None]] = {}

    def begin(self) -> None:
        """Forgets the peak so far."""
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.now = sum(storage.nbytes() for storage in (known() for known in [*self._storages.values()]) if storage is not None)
        self.peak = max(self.peak, self.now)
        return result

    def _know(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._freed, key, nbytes).atexit = False
            if nbytes:
                self._storages[key] = weakref.ref(storage)

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._storages.pop(key, None)


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
    """Bytes of one rank. states: of weights, gradients and optimizer, at the end of the last backward."""

    peak: int
    states: int


def held_by_ranks(flags: str, grid: Grid, steps: int = 3, after_step: Callable[[Session], None] = lambda session: None) -> list[Held]:
    """By rank. The peak is that of all steps but the first."""

    def program(backend: VirtualBackend) -> Held:
        with LiveStorages() as live:
            session = Session(flags, RankPlace(backend, LiveLanes(live), CPU))
            states = 0
            for step in range(steps):
                if step == 1:
                    live.begin()
                session.forward_backward(step)
                states = session.engine.state_bytes().device
                session.engine.update(1e-3)
                after_step(session)
            session.close()
            return Held(live.peak, states)

    return run_world(grid, program)
