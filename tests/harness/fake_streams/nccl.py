"""Collectives of NCCL on the streams of a machine, over those of a virtual world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.fake_streams.accesses import Accesses
from megatron_zpp.comm.backend import VirtualBackend, Work
from megatron_zpp.parallel.topology import Lane


@dataclass
class FakeNccl:
    """A backend. A collective runs in the stream that calls it, as NCCL's do with async_op=False, and the host does not wait for it.

    times: how long a collective of each lane takes, counted from its start on this rank: ranks run alike. Two collectives of one lane need
    an order, as two writes to one memory do: NCCL starts those of one communicator one after the other.
    """

    backend: VirtualBackend
    accesses: Accesses
    times: Mapping[Lane, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grid = self.backend.grid
        self.rank = self.backend.rank
        self._communicators: dict[Lane, Tensor] = {}

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        self._enqueue(f"gather {lane}", own, [output, self._communicator(lane)], self.times.get(lane, 0.0))
        with self.accesses.paused():
            self.backend.all_gather(lane, output, own).wait()
        return None

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        self._enqueue(f"exchange {lane}", sent, [output, self._communicator(lane)], self.times.get(lane, 0.0))
        with self.accesses.paused():
            self.backend.exchange(lane, output, sent).wait()
        return None

    def gather_world(self, own: Tensor) -> Tensor:
        with self.accesses.paused():
            gathered = self.backend.gather_world(own)
        self._enqueue("gather of the world", own, [gathered], 0.0)
        return gathered

    def _communicator(self, lane: Lane) -> Tensor:
        """Memory that every collective of the lane writes."""
        if lane not in self._communicators:
            with self.accesses.paused():
                self._communicators[lane] = torch.empty(1)
        return self._communicators[lane]

    def _enqueue(self, label: str, sent: Tensor, writes: list[Tensor], time: float) -> None:
        self.accesses.access(label, [sent], writes)
        self.accesses.machine.spend(time)
