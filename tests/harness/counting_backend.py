"""A backend that writes down the collectives of the tensor link and of the context link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from megatron_zpp.comm.backend import Backend, Work
from megatron_zpp.parallel.topology import ACROSS_LANES, CONTEXT_ACROSS, Lane


@dataclass
class CountingBackend:
    """The collectives of `backend`. pause: called before each of them.

    calls: kind and bytes of every collective of these links, in order. received_bytes: what other ranks have sent to this one in them.
    """

    backend: Backend
    pause: Callable[[], None] = lambda: None
    calls: list[tuple[str, int]] = field(default_factory=list)
    received_bytes: int = 0
    exchanges: list[int] = field(default_factory=list)  # bytes of those over the context link

    def __post_init__(self) -> None:
        self.grid = self.backend.grid
        self.rank = self.backend.rank

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        self._count("gather", lane, output)
        return self.backend.all_gather(lane, output, own)

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        self._count("exchange", lane, output)
        return self.backend.exchange(lane, output, sent)

    def gather_world(self, own: Tensor) -> Tensor:
        return self.backend.gather_world(own)

    def _count(self, kind: str, lane: Lane, output: Tensor) -> None:
        self.pause()
        if lane in ACROSS_LANES:
            ranks = self.grid.link_ranks(lane.link)
            self.calls.append((kind, output.nbytes))
            if lane == CONTEXT_ACROSS:
                self.exchanges.append(output.nbytes)
            self.received_bytes += output.nbytes // ranks * (ranks - 1)
