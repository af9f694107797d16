"""Reuses the buffers that payloads pass through: a buffer that was given back is taken again for a payload of the same size."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class Staging:
    """The free buffers of one device, by size in bytes. Several threads may use it. On CUDA, streams wait for each other (see `give`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[tuple[Tensor, Any]]] = {}
        self.allocated_bytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """A uint8 buffer of `nbytes`, contents undefined; the caller gives it back."""
        with self._lock:
            free = self._free.get(nbytes)
            found = free.pop() if free else None
            if found is None:
                self.allocated_bytes += nbytes
        if found is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        buffer, event = found
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        return buffer

    def clear(self) -> None:
        """Frees the buffers that are not taken. Every use of them must have ended."""
        with self._lock:
            self.allocated_bytes -= sum(nbytes * len(buffers) for nbytes, buffers in self._free.items())
            self._free.clear()

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back. On CUDA, the stream of its next user waits until the current stream has finished with it."""
        event = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        with self._lock:
            self._free.setdefault(buffer.numel(), []).append((buffer, event))
