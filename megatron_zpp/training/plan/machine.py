"""A machine that computes nothing and keeps time: the streams of a device or the thread of a CPU's lanes, links, and the host.

The engine and the model run on it as on a real device. Their tensors have no values, so every operation returns at once; what it would take
is added to the time of whatever carries it out.

- A link carries one hop at a time, first come, first served: bytes / rate, plus a constant for every collective. Both directions of a
  link share nothing (full duplex), and all ranks of a node send at once, so a hop between nodes costs what enters the node.
- A hop over the inter link occupies the link between nodes, even if its partitions are parts of one node.
- Ranks that share layers or divide samples have priority: their hops begin at once, and what waits for the link waits so much longer.
- A collective between N nodes also takes the latency of their link once for each of its rounds: N - 1 for a gather (a ring), 1 for an
  exchange, in which every node sends to all others at once. Other hops use the link meanwhile.
- Communication does not slow down computation; on a CPU codecs do, because they run on its cores.
- Products take their operations, and codecs their values. Casting and copying on a device takes no time; nor does any other operation,
  because the rate of products is that of whole steps. The optimizer on a device counts as computation.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.comm.lanes import Hop
from megatron_zpp.comm.ledger import Traffic
from megatron_zpp.comm.moves import NEVER, Move, first_move
from megatron_zpp.ops.planned import CodecWork
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import LANES, Direction, Lane, Link


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
    """Seconds per value on one rank, for each kind of work that CodecWork counts."""

    encoded: float = 0.0
    decoded: float = 0.0
    summed: float = 0.0
    gaussian_encoded: float = 0.0
    gaussian_decoded: float = 0.0
    rotated: float = 0.0
    subtracted: float = 0.0

    def seconds(self, work: CodecWork) -> float:
        return sum(count * getattr(self, name) for name, count in vars(work).items() if count)

    def times(self, factor: float) -> CodecSpeed:
        """The speed of a codec that takes `factor` times as long."""
        return CodecSpeed(*(factor * seconds for seconds in astuple(self)))


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

    flops_per_second: of the products of one rank; inf if only memory and bytes are asked for.
    inter_exchange_efficiency: share of the inter link's rate that hops of quantized values reach. tensor: the link between ranks that share
    layers; None: as fast as `intra`. host: None if the device is the host.
    """

    inter: LinkSpeed
    intra: LinkSpeed
    codec: CodecSpeed
    overlap: Overlap
    flops_per_second: float = math.inf
    inter_exchange_efficiency: float = 1.0
    tensor: LinkSpeed | None = None
    host: HostSpeed | None = None

    @property
    def tensor_link(self) -> LinkSpeed:
        return self.tensor or self.intra
