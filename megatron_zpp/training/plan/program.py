"""The program of a step: what a rank computes, sends and waits for, in order, as the engine and the model did it on tensors without values.

A clock plays it (training/plan/clock.py). What refers to something earlier counts back from the latest of its kind, so that the part of one
layer can be repeated for others that are alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.ops.planned import CodecWork
from megatron_zpp.parallel.topology import Lane

COMPUTATION = 0  # the stream of computation


@dataclass(frozen=True)
class Compute:
    """Products of so many floating-point operations."""

    flops: float


@dataclass(frozen=True)
class Cross:
    """A collective of the model in a stream."""

    stream: int
    lane: Lane
    traffic: Traffic


@dataclass(frozen=True)
class Copy:
    """A copy between the device and its host in a stream. down: to the host."""

    stream: int
    nbytes: int
    down: bool


@dataclass(frozen=True)
class Mark:
    """An event in a stream."""

    stream: int


@dataclass(frozen=True)
class Await:
    """`stream` waits for a mark of another one; back: how many of its marks are later."""

    stream: int
    marked: int
    back: int


@dataclass(frozen=True)
class Follow:
    """`stream` waits for everything in another one."""

    stream: int
    other: int


@dataclass
class Submit:
    """A hop of the engine. follows: how many hops on its lane, `follows_on`, were submitted after the one that must land first, if any.

    before, after: work of codecs before and after the collective. host_bytes: that come up from the host for it. The work is known when
    the lanes have done it.
    """

    lane: Lane
    traffic: Traffic
    unit: str = ""
    follows_on: Lane | None = None
    follows: int = 0
    before: CodecWork = CodecWork()
    after: CodecWork = CodecWork()
    host_bytes: int = 0


@dataclass(frozen=True)
class Wait:
    """Computation waits for a hop; back: how many hops of its lane were submitted later."""

    lane: Lane
    back: int


@dataclass(frozen=True)
class Booked:
    """Bytes that the ledger books."""

    category: Category
    traffic: Traffic


@dataclass(frozen=True)
class GatherNumbers:
    """A few numbers come to every rank, and all wait."""


@dataclass(frozen=True)
class UpdateOnHost:
    """AdamW on the host, of so many values."""

    numel: int


@dataclass(frozen=True)
class ComeDown:
    """Gradients start on their way to the host, which has waited for them."""

    nbytes: int


@dataclass(frozen=True)
class Arrived:
    """The host waits for gradients on their way; back: how many came down later."""

    back: int


Item = Compute | Cross | Copy | Mark | Await | Follow | Submit | Wait | Booked | GatherNumbers | UpdateOnHost | ComeDown | Arrived


@dataclass
class Segment:
    """What belongs to one use in forward or backward. microbatch: None after the last one."""

    microbatch: int | None
    verb: str
    name: str
    items: list[Item] = field(default_factory=list)
