"""The link between a device and the memory of its host.

    down    values of the device are copied to pinned memory, one unit ahead of the one that the host works on
    up      the host encodes a payload in pinned memory, from which the device copies it

The pinned memory is allocated once: SLOTS places in each direction, which units use in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.streams import Event, Stream, Streams

HOST = torch.device("cpu")
SLOTS = 2  # one is copied while the host works on the other


class Arrival:
    """Values of the device on the host. values: where they are once `wait` has returned; without a copy, those of the device themselves."""

    def __init__(self, values: Regions, copy: Callable[[], Event] | None = None) -> None:
        self.values = values
        self._copy = copy
        self._copied: Event | None = None

    def start(self) -> None:
        """Starts the copy. The host must have waited for the values, and have finished with the last ones of this place."""
        if self._copy is not None:
            self._copied = self._copy()

    def wait(self) -> None:
        """Returns once the copy that was started has ended."""
        if self._copied is not None:
            self._copied.synchronize()


@dataclass
class _Slot:
    """A place of payloads on their way up. copied: the event of the last copy from it."""

    memory: Tensor
    copied: Event | None = None


class HostLink:
    """Copies between a device and its host. streams: of the device; None if its memory is that of the host, so that nothing is copied.

    host: where memory of the host is; the meta device in a plan.
    crossings: number of copies so far. pinned_bytes: memory that has been pinned.
    """

    def __init__(self, streams: Streams | None, host: torch.device = HOST) -> None:
        self.host = host
        self._streams = streams
        self._down: Stream | None = None
        self._slots: list[_Slot] = []
        self._largest_payload = 0
        self._encoded = 0
        self.crossings = 0
        self.pinned_bytes = 0

    @property
    def copies(self) -> bool:
        """Whether the host has memory of its own."""
        return self._streams is not None

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] zeros on the host, which only the host reads and writes."""
        if self._streams is None:
            return torch.zeros(numel, dtype=dtype, device=self.host)
        return self._streams.host_memory(numel, dtype, is_pinned=False)

    def arrivals(self, of_units: Sequence[Regions]) -> list[Arrival]:
        """The place on the host for the values of each unit.

        The copy of unit i may start when the host has finished with unit i - SLOTS.
        """
        if self._streams is None:
            return [Arrival(values) for values in of_units]
        self._down = self._streams.make(is_urgent=True)
        turns = [of_units[first::SLOTS] for first in range(min(SLOTS, len(of_units)))]
        places = [self._pinned(max(_numel(values) for values in units), torch.float32) for units in turns]
        return [self._arrival(values, places[index % SLOTS][: _numel(values)]) for index, values in enumerate(of_units)]

    def reserve(self, payload_bytes: int) -> None:
        """Makes room for payloads of this size. Call it before the first payload is encoded."""
        self._largest_payload = max(self._largest_payload, payload_bytes)

    def encode(self, encode: Callable[[Tensor], None], payload: Tensor) -> None:
        """Fills `payload`, bytes on the device, by what `encode` writes into bytes of the same shape on the host.

        The current stream copies them.
        """
        if self._streams is None:
            encode(payload)
            return
        slot = self._next_slot(self._streams)
        written = slot.memory[: payload.numel()].view(payload.shape)
        encode(written)
        payload.copy_(written, non_blocking=True)
        slot.copied = self._streams.current().record_event()
        self.crossings += 1

    def _next_slot(self, streams: Streams) -> _Slot:
        """The place that has been used least recently, when the device has copied from it."""
        if not self._slots:
            self._slots = [_Slot(self._pinned(self._largest_payload, torch.uint8)) for _ in range(SLOTS)]
        slot = self._slots[self._encoded % SLOTS]
        self._encoded += 1
        if slot.copied is not None:
            slot.copied.synchronize()
        return slot

    def _arrival(self, values: Regions, place: Tensor) -> Arrival:
        arrived = Regions.of(place, values.slice_shape)
        return Arrival(arrived, partial(self._copy_down, values, arrived))

    def _copy_down(self, values: Regions, arrived: Regions) -> Event:
        if self._streams is None or self._down is None:
            raise RuntimeError("without streams nothing is copied to the host")
        with self._streams.entered(self._down):
            for source, place in zip(values.parts(), arrived.parts(), strict=True):
                place.copy_(source, non_blocking=True)
        self.crossings += 1
        return self._down.record_event()

    def _pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self._streams is None:
            raise RuntimeError("without streams no memory is pinned")
        self.pinned_bytes += numel * dtype.itemsize
        return self._streams.host_memory(numel, dtype)


@dataclass(frozen=True)
class Home:
    """Where an optimizer keeps and updates its state. link: between it and the device; it copies nothing if they are the same memory.

    runs_behind: whether updates are enqueued on a device, so that the host need not know the gradient norm before them.
    is_host: whether the state was asked for on the host, even if that is the device as well.
    """

    device: torch.device
    link: HostLink
    runs_behind: bool
    is_host: bool = False

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] zeros in this memory."""
        return self.link.zeros(numel, dtype) if self.is_host else torch.zeros(numel, dtype=dtype, device=self.device)


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


def _numel(values: Regions) -> int:
    return sum(part.numel() for part in values.parts())
