"""Reuses the buffers that payloads pass through: a buffer that was given back is taken again for a payload of the same size."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.comm.streams import Stream, Streams


@dataclass(frozen=True)
class _Given:
    """A free buffer. event: its last use has ended; None without streams."""

    buffer: Tensor
    event: Any


class Staging:
    """The free buffers of one device, by size in bytes and by the stream that takes them. Several threads may use it.

    streams: of the device; None for a CPU. The host runs ahead of the streams, so a free buffer may still be in use on the device: the
    stream that takes it waits for its last use. Each stream therefore has buffers of its own. Otherwise computation would take the buffer
    of a hop that has just been submitted, and wait for that hop. Of its own buffers a stream takes the one given back first.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self.device = device
        self._streams = streams
        self._free: dict[tuple[int, Stream | None], deque[_Given]] = {}
        self._takers: dict[int, Stream | None] = {}  # by identity of their storage, of the buffers that are taken
        self.allocated_bytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """A uint8 buffer of `nbytes`, contents undefined; the caller gives it back."""
        stream = None if self._streams is None else self._streams.current()
        with self._lock:
            free = self._free.get((nbytes, stream))
            found = None
            if free:
                # Without streams the buffer given back last is taken: it may still be in the processor's cache.
                found = free.pop() if stream is None else free.popleft()
            else:
                self.allocated_bytes += nbytes
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device) if found is None else found.buffer
        if stream is not None and found is not None:
            stream.wait_event(found.event)
        with self._lock:
            self._takers[_identity(buffer)] = stream
        return buffer

    def clear(self) -> None:
        """Frees the buffers that are not taken. What the streams that took them do next must come after every use of them."""
        with self._lock:
            self.allocated_bytes -= sum(nbytes * len(buffers) for (nbytes, _), buffers in self._free.items())
            self._free.clear()

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back. The stream of its next user waits until the current stream has finished with it."""
        event = None if self._streams is None else self._streams.current().record_event()
        with self._lock:
            taker = self._takers.pop(_identity(buffer))
            self._free.setdefault((buffer.numel(), taker), deque()).append(_Given(buffer, event))


def _identity(buffer: Tensor) -> int:
    """A number that no other storage has while this one exists. (The address of a tensor of a plan is 0.)"""
    return buffer.untyped_storage()._cdata
