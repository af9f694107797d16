"""The streams of a device: queues of kernels that run beside each other. Events order them.

Lanes, staging and snapshots use streams through these protocols alone, so that tests can run them on streams of a model machine, which
finds accesses without an order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_zpp.comm.pinned_memory import pinned_zeros

_LEAST_PINNED_EXACTLY = 1 << 20  # bytes; for less, it is quicker to take memory from torch's pool, which rounds up to a power of two


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Returns once the stream has come to this point; the host waits for nothing that was enqueued later."""


class Stream(Protocol):
    """A queue of kernels. Two objects for the same stream are equal and have equal hashes."""

    def record_event(self) -> Event:
        """An event that is reached when the stream has done everything enqueued so far."""

    def wait_event(self, event: Any) -> None:
        """What is enqueued from now on waits for the event; the host does not."""

    def wait_stream(self, stream: Any) -> None:
        """What is enqueued from now on waits for everything enqueued in `stream` so far; the host does not."""

    def synchronize(self) -> None:
        """Returns once the stream has done its work."""


class Streams(Protocol):
    """The streams of one device."""

    def make(self, *, is_urgent: bool = False) -> Stream:
        """A new stream. is_urgent: its kernels start before waiting kernels of other streams."""

    def current(self) -> Stream:
        """The stream in which this thread enqueues now; computation has one of its own."""

    def entered(self, stream: Any) -> AbstractContextManager[object]:
        """Makes this thread enqueue in `stream` inside the block."""

    def synchronize(self) -> None:
        """Returns once every stream has done its work."""

    def host_memory(self, numel: int, dtype: torch.dtype, *, is_pinned: bool = True) -> Tensor:
        """[numel] zeros in memory of the host. is_pinned: the device copies to and from it while the host goes on."""


class CudaStreams:
    """The streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self, *, is_urgent: bool = False) -> Stream:
        return torch.cuda.Stream(self._device, priority=-1 if is_urgent else 0)

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def entered(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def host_memory(self, numel: int, dtype: torch.dtype, *, is_pinned: bool = True) -> Tensor:
        if not is_pinned:
            return torch.zeros(numel, dtype=dtype, device="cpu")
        if numel * dtype.itemsize < _LEAST_PINNED_EXACTLY:
            return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)  # from a pool
        return pinned_zeros(numel, dtype)


class SideStream:
    """A stream for work that the current stream does not wait for at once."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._stream = streams.make()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enqueues in this stream inside the block, after everything that the current stream has been given."""
        self._stream.wait_stream(self._streams.current())
        with self._streams.entered(self._stream):
            yield

    def join(self) -> None:
        """Makes the current stream wait for everything enqueued here."""
        self._streams.current().wait_stream(self._stream)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of the device; None if it has none and runs each operation at once, as a CPU does."""
    return CudaStreams(device) if device.type == "cuda" else None
