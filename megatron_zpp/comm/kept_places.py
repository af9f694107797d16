"""Places in which values of a device are kept for a while: in new memory, in an arena, or in pinned memory of its host.

forward     keep(0, values)   keep(1, values)   keep(2, values)
backward                                        kept 2: start, values    kept 1: start, values    ...
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_zpp.comm.streams import Event, Streams


class Kept(Protocol):
    """Values in a place."""

    def start(self) -> None:
        """Starts to bring the values to the device if they are elsewhere. Does nothing if they are under way."""

    def values(self) -> Tensor:
        """The values [numel] on the device, for operations of the current stream; nobody may write to them."""


class Places(Protocol):
    """One place for each chunk of a model."""

    def keep(self, place: int, values: Tensor) -> Kept:
        """Keeps `values` [numel] of the device, which nobody may write to. What was kept in this place before is lost.

        Raises RuntimeError if the place is too small.
        """


class NewPlaces:
    """Keeps the tensors themselves, so their memory is new in every micro-batch."""

    def keep(self, place: int, values: Tensor) -> Kept:
        return _There(values)


class Arena:
    """Places in memory of the device that is allocated once."""

    def __init__(self, places: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """numel: of each place."""
        self._slots = _Slots(torch.empty((places, numel), dtype=dtype, device=device))

    @property
    def nbytes(self) -> int:
        return self._slots.memory.nbytes

    def keep(self, place: int, values: Tensor) -> Kept:
        kept = _InArena(self._slots, place, values.numel())
        self._slots.given_to(kept, place, values.numel()).copy_(values)
        return kept


class HostPlaces:
    """Places in pinned memory of the host, which is allocated once. A stream copies down, another one up.

    The values of a place leave the device while computation goes on: the next `keep` makes computation wait for the copy, and frees them.
    """

    def __init__(self, places: int, numel: int, dtype: torch.dtype, device: torch.device, streams: Streams) -> None:
        """numel: of each place."""
        self._slots = _Slots(streams.host_memory(places * numel, dtype).view(places, numel))
        self._device = device
        self._streams = streams
        self._down, self._up = streams.make(), streams.make()
        self._leaving: tuple[Tensor, Event] | None = None

    @property
    def nbytes(self) -> int:
        return self._slots.memory.nbytes

    def keep(self, place: int, values: Tensor) -> Kept:
        kept = _OnHost(self, place, values.numel())
        slot = self._slots.given_to(kept, place, values.numel())
        self._let_go()
        self._down.wait_stream(self._streams.current())
        with self._streams.entered(self._down):
            slot.copy_(values, non_blocking=True)
            self._leaving = values, self._down.record_event()
        return kept

    def copied_up(self, kept: _OnHost, place: int, numel: int) -> tuple[Tensor, Event]:
        """New memory of the device, and when the values of the place are there."""
        slot = self._slots.of(kept, place, numel)
        self._let_go()  # the copy down may be the one of this place
        values = torch.empty(numel, dtype=slot.dtype, device=self._device)
        self._up.wait_stream(self._streams.current())
        with self._streams.entered(self._up):
            values.copy_(slot, non_blocking=True)
            return values, self._up.record_event()

    def wait(self, event: Event) -> None:
        """Makes the current stream wait for a copy."""
        self._streams.current().wait_event(event)

    def _let_go(self) -> None:
        """Frees the values that were copied last. Memory goes back to the current stream, so this stream waits for the copy."""
        if self._leaving is not None:
            self._streams.current().wait_event(self._leaving[1])
            self._leaving = None


def make_places(places: int, numel: int, dtype: torch.dtype, device: torch.device, *, streams: Streams | None, on_host: bool) -> Places:
    """Places that are allocated now, on the device or on its host. A device without streams has the memory of its host."""
    if on_host and streams is not None:
        return HostPlaces(places, numel, dtype, device, streams)
    return Arena(places, numel, dtype, device)


class _Slots:
    """memory: [places, numel]. Every place has the owner of its values, so that an older owner does not read them as its own."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._owners: list[Kept | None] = [None] * len(memory)

    def given_to(self, owner: Kept, place: int, numel: int) -> Tensor:
        """The first `numel` elements of a place, for new values."""
        if numel > self.memory.shape[1]:
            raise RuntimeError(f"place {place} has {self.memory.shape[1]} elements, too few for {numel}; micro-batches must not grow")
        self._owners[place] = owner
        return self.memory[place, :numel]

    def of(self, owner: Kept, place: int, numel: int) -> Tensor:
        """The same elements, with the owner's values."""
        if self._owners[place] is not owner:
            raise RuntimeError(f"the values in place {place} were overwritten by a later forward; end the backward of a forward first")
        return self.memory[place, :numel]


class _There:
    def __init__(self, values: Tensor) -> None:
        self._values = values

    def start(self) -> None: ...

    def values(self) -> Tensor:
        return self._values


class _InArena:
    def __init__(self, slots: _Slots, place: int, numel: int) -> None:
        self._slots = slots
        self._place = place
        self._numel = numel

    def start(self) -> None: ...

    def values(self) -> Tensor:
        return self._slots.of(self, self._place, self._numel)


class _OnHost:
    def __init__(self, places: HostPlaces, place: int, numel: int) -> None:
        self._places = places
        self._place = place
        self._numel = numel
        self._arriving: tuple[Tensor, Event] | None = None

    def start(self) -> None:
        if self._arriving is None:
            self._arriving = self._places.copied_up(self, self._place, self._numel)

    def values(self) -> Tensor:
        self.start()
        if self._arriving is None:
            raise RuntimeError(f"nothing comes from place {self._place}")
        (values, event), self._arriving = self._arriving, None
        self._places.wait(event)
        return values
