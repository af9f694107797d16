"""Brings a few numbers from a device to the host in two halves, so that work can be enqueued in between."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_zpp.comm.streams import Event, Streams


class Readout:
    """Numbers on their way to the host. streams: of the device that has them; None if it has none."""

    def __init__(self, numbers: Tensor, streams: Streams | None) -> None:
        """numbers: [numel] fp64, which the current stream has computed. Their copy is enqueued there."""
        self._host = numbers
        self._copied: Event | None = None
        if streams is not None:
            self._host = streams.host_memory(numbers.numel(), torch.float64)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = streams.current().record_event()

    def wait(self) -> list[float]:
        """The numbers. The host waits for their copy, and for nothing that was enqueued after it. Those of a plan are 0."""
        if self._copied is not None:
            self._copied.synchronize()
        return [0.0] * self._host.numel() if self._host.is_meta else self._host.tolist()
