"""The speeds of a machine on which a step is planned: links, codecs, products, and the host of its GPUs (no torch)."""

from __future__ import annotations

import enum
from dataclasses import astuple, dataclass


class Overlap(enum.Enum):
    """What runs beside computation. STREAMS: hops, with their codecs. THREAD: hops; codecs take the cores of computation. NONE: nothing."""

    STREAMS = "streams"
    THREAD = "thread"
    NONE = "none"


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of a link. bytes_per_second: into one node from others, or into one rank from its own node.

    latency_seconds: of a message in one direction, between nodes.
    """

    bytes_per_second: float
    seconds_per_collective: float = 0.0
    latency_seconds: float = 0.0


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds per value on one rank, for each kind of work of ops/planned.py:CodecWork."""

    encoded: float = 0.0
    decoded: float = 0.0
    summed: float = 0.0
    gaussian_encoded: float = 0.0
    gaussian_decoded: float = 0.0
    rotated: float = 0.0
    subtracted: float = 0.0

    def times(self, factor: float) -> CodecSpeed:
        """The speed of a codec that takes `factor` times as long."""
        return CodecSpeed(*(factor * seconds for seconds in astuple(self)))


@dataclass(frozen=True)
class SocketSpeed:
    """Seconds of the cores that compute for each byte that a rank receives, in a gather and in an exchange; sending others' is included."""

    gathered: float = 0.0
    exchanged: float = 0.0

    def times(self, factor: float) -> SocketSpeed:
        """The speed where each byte takes `factor` times as long."""
        return SocketSpeed(factor * self.gathered, factor * self.exchanged)


@dataclass(frozen=True)
class HostSpeed:
    """The host of the GPUs of a node. bytes_per_second: between it and each of them, in each direction.

    values_per_second: that all cores of the node update together.
    """

    bytes_per_second: float
    values_per_second: float


@dataclass(frozen=True)
class Machine:
    """The speeds of a machine.

    flops_per_second: of the products of one rank.
    inter_exchange_efficiency: share of the inter link's rate that hops of quantized values reach. tensor: the link between ranks that share
    layers; None: as fast as `intra`. host: None if the device is the host. socket: counts where a thread carries lanes (Overlap.THREAD).
    """

    inter: LinkSpeed
    intra: LinkSpeed
    codec: CodecSpeed
    overlap: Overlap
    flops_per_second: float
    inter_exchange_efficiency: float = 1.0
    tensor: LinkSpeed | None = None
    host: HostSpeed | None = None
    socket: SocketSpeed = SocketSpeed()

    @property
    def tensor_link(self) -> LinkSpeed:
        return self.tensor or self.intra
