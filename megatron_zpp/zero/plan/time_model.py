"""Predicts how long a step takes on a machine, by simulating it with clocks (no torch).

Assumptions:
- A link carries one hop at a time, first come, first served: `bytes / rate`, plus a constant for every collective. Both directions of a
  link share nothing (full duplex), and all ranks of a node send at once, so a hop between nodes costs what enters the node.
- A hop over the inter link occupies the link between nodes, even if its partitions are parts of one node.
- Ranks that share layers have priority on the link inside a node: what waits for that link waits so much longer. What they exchange beside
  computation (model/layer_work.py says what) is hidden by the gradients of one use's weights, which take as long as its forward. That is
  not measured.
- Ranks that divide samples exchange over the link inside a node, or between nodes, with the same priority. Computation waits for all of it
  but one exchange of backward, which crosses beside the gradient of one weight and is hidden by that product alone. That is not measured
  either. On a CPU a thread of gloo moves these bytes; what it takes from the cores of computation is left out.
- Computation waits for the constant of every collective of ranks that share layers or divide samples.
- A collective between N nodes also takes the latency of their link once for each of its rounds, one after the other: N - 1 for a gather
  (a ring), 1 for an exchange, in which every node sends to all others at once. Other hops use the link meanwhile. At the end of a step two
  gathers bring numbers to all ranks, and nothing runs beside them.
- Communication does not slow down computation; codecs do so in one case (Overlap.THREAD).
- Overlap.STREAMS: hops run beside computation, encoding and decoding included (lanes on CUDA streams). Overlap.THREAD: the
  same, but one thread encodes and decodes for all lanes on the cores of computation, which stops meanwhile unless it waits (lanes on gloo).
  Overlap.NONE: every hop is waited for where it is submitted.
- Casting and copying 16-bit values takes no time; quantizing costs a constant per value, and a Gaussian code another one, and one more
  for each round of its rotation. The optimizer's time counts as computation.
- An optimizer on the host of a GPU begins when the host knows the norm, and updates unit after unit, each before its next climb, by the
  thread that enqueues computation: a use is enqueued when the units that climb before it have been updated. Gradients of the next unit come
  down meanwhile. Payloads come up before they are gathered; encoding them is part of the update.
- Kept inputs on the host cross the same link as gradients and payloads (zero/plan/host_copies.py).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from megatron_zpp.comm.ledger import context_link_traffic
from megatron_zpp.comm.moves import NEVER, Move, Times, first_move
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.link_work import NO_LINK_WORK, LinkWorkOfUses
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.parallel.topology import LADDER_LINKS, LANES, Direction, Lane, Link
from megatron_zpp.zero.plan.host_copies import NOTHING_ON_HOST, HostLinkClock, KeptCopies, KeptOnHost
from megatron_zpp.zero.plan.memory_plan import MAIN_BYTES, Sharding
from megatron_zpp.zero.plan.planned_hops import CodecWork, PlannedHop
from megatron_zpp.zero.plan.step_simulation import SIMULATED_MICROBATCHES, StepSimulation


class Overlap(enum.Enum):
    """What runs beside computation."""

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
    """Seconds per value on one rank, for each kind of work that CodecWork counts.

    summed: per value and member, when a mean is decoded. gaussian_encode, gaussian_decode: without the rotation. rotate: per round.
    subtract: a difference is taken from a kept copy.
    """

    encode: float = 0.0
    decode: float = 0.0
    summed: float = 0.0
    gaussian_encode: float = 0.0
    gaussian_decode: float = 0.0
    rotate: float = 0.0
    subtract: float = 0.0

    def seconds(self, work: CodecWork) -> float:
        return sum(count * seconds for count, seconds in zip(vars(work).values(), vars(self).values(), strict=True))  # astuple copies

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
    """The machine of a step.

    inter_exchange_efficiency: share of the inter link's rate that hops of quantized values reach. tensor: the link between ranks that share
    layers; None: as fast as `intra`. host: None if the device is the host.
    """

    inter: LinkSpeed
    intra: LinkSpeed
    codec: CodecSpeed
    overlap: Overlap
    inter_exchange_efficiency: float = 1.0
    tensor: LinkSpeed | None = None
    host: HostSpeed | None = None

    @property
    def tensor_link(self) -> LinkSpeed:
        return self.tensor or self.intra


@dataclass(frozen=True)
class Computation:
    """Seconds of each use's forward and backward for one micro-batch, recomputation included."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def of(self, use: int, *, is_backward: bool) -> float:
        return (self.backward if is_backward else self.forward)[use]

    @property
    def seconds(self) -> float:
        return sum(self.forward) + sum(self.backward)


@dataclass(frozen=True)
class StepTime:
    """Seconds that one step takes, and for how many of them each part of the machine is busy."""

    seconds: float
    computing: float
    inter_link: float
    intra_link: float
    codecs: float
    tensor_link: float = 0.0
    context_link: float = 0.0
    host_link: float = 0.0
    host: float = 0.0
    latency: float = 0.0

    @property
    def busy(self) -> dict[str, float]:
        """Busy seconds by the name of each part."""
        parts = {
            "computation": self.computing,
            "link between nodes": self.inter_link,
            "link inside a node": self.intra_link,
            "codecs": self.codecs,
        }
        others = {
            "tensor link": self.tensor_link,
            "context link": self.context_link,
            "link to the host": self.host_link,
            "AdamW on the host": self.host,
            "latency between nodes": self.latency,
        }
        return parts | {name: seconds for name, seconds in others.items() if seconds > 0}

    def __sub__(self, other: StepTime) -> StepTime:
        return self.plus(-1, other)

    def plus(self, times: int, other: StepTime) -> StepTime:
        return StepTime(*(own + times * others for own, others in zip(astuple(self), astuple(other), strict=True)))


GATHERS_OF_NUMBERS = 2  # the losses with the stop requests, and the squared norms
BUSY = tuple(field.name for field in fields(StepTime) if field.name not in ("seconds", "host_link"))


@dataclass(frozen=True)
class Job:
    """A model to train and how it is sharded. tensor_work, context_work: of each use, if ranks share layers, or divide samples.

    kept_on_host: of recomputed chunks.
    """

    unit_specs: Sequence[UnitSpec]
    uses: Sequence[Use]
    sharding: Sharding
    grid: Grid
    microbatches: int
    tensor_work: LinkWorkOfUses = NO_LINK_WORK
    context_work: LinkWorkOfUses = NO_LINK_WORK
    kept_on_host: KeptOnHost = NOTHING_ON_HOST


def step_time(job: Job, machine: Machine, computation: Computation) -> StepTime:
    """The time of a step in the middle of a run: its first climbs were submitted in the step before."""
    simulated = min(job.microbatches, SIMULATED_MICROBATCHES)
    found = _simulated_time(job, machine, computation, simulated)
    if simulated == job.microbatches:
        return found
    one_more = found - _simulated_time(job, machine, computation, simulated - 1)
    return found.plus(job.microbatches - simulated, one_more)


def _simulated_time(job: Job, machine: Machine, computation: Computation, microbatches: int) -> StepTime:
    clock = _CLOCKS[machine.overlap](machine, computation, job)
    simulation: StepSimulation[Any] = StepSimulation(job.unit_specs, job.uses, job.sharding, job.grid, clock)
    simulation.step(microbatches, submits_next_climbs=True)
    before = clock.reading()
    simulation.step(microbatches, submits_next_climbs=True)
    return clock.reading() - before


@dataclass(frozen=True)
class _Pending:
    """A hop on a stream. end: when it lands."""

    end: float


class _Clock:
    """Time on one rank: computation has reached `now`, each link is busy until `link_free`, and `busy` sums the seconds of each part.

    The host of a device enqueues work at once, except while it updates weights: until `_host_now`.
    """

    def __init__(self, machine: Machine, computation: Computation, job: Job) -> None:
        self.machine = machine
        self.computation = computation
        self.grid = job.grid
        self.tensor_work = job.tensor_work
        self.context_work = job.context_work
        self.now = 0.0
        self.busy = dict.fromkeys(BUSY, 0.0)
        self._host_now = 0.0
        self._arrivals: deque[float] = deque()  # of gradients on the host, of the units that are updated next
        self._host_link = HostLinkClock(machine.host.bytes_per_second if machine.host is not None else math.inf)
        self._kept = KeptCopies(job.kept_on_host if machine.host is not None else NOTHING_ON_HOST, self._host_link, job.uses)
        self.link_free = dict.fromkeys(LADDER_LINKS, 0.0)

    def reading(self) -> StepTime:
        return StepTime(self.now, host_link=self._host_link.busy, **self.busy)

    @property
    def enqueued(self) -> float:
        """The earliest time at which what the host enqueues next can begin."""
        return max(self.now, self._host_now)

    def compute(self, use: int, *, is_backward: bool) -> None:
        seconds = self.computation.of(use, is_backward=is_backward)
        self.busy["computing"] += seconds
        self.now = self._kept.before(use, self.enqueued, is_backward=is_backward)
        self.now += seconds + self._exchange_layers(use, is_backward=is_backward) + self._exchange_heads(use, is_backward=is_backward)

    def _exchange_layers(self, use: int, *, is_backward: bool) -> float:
        """Seconds for which the computation of a use waits for the ranks that share its layers."""
        work, link = self.tensor_work.of(use, is_backward=is_backward), self.machine.tensor_link
        if work.collectives == 0:
            return 0.0
        blocking = work.blocking_bytes / link.bytes_per_second + work.collectives * link.seconds_per_collective
        beside = work.overlapped_bytes / link.bytes_per_second
        self.busy["tensor_link"] += blocking + beside
        self.link_free[Link.INTRA] = max(self.now, self.link_free[Link.INTRA]) + blocking + beside
        return blocking + max(0.0, beside - self.tensor_work.hiding * self.computation.of(use, is_backward=False))

    def _exchange_heads(self, use: int, *, is_backward: bool) -> float:
        """Seconds for which the computation of a use waits for the ranks that divide its samples."""
        work = self.context_work.of(use, is_backward=is_backward)
        if work.collectives == 0:
            return 0.0
        traffic, machine = context_link_traffic(self.grid, work.nbytes), self.machine
        between = self.grid.into_node(traffic.context_inter_bytes) / machine.inter.bytes_per_second
        within = (traffic.context_bytes - traffic.context_inter_bytes) / machine.intra.bytes_per_second
        speed = machine.inter if between else machine.intra
        seconds = max(between, within) + work.collectives * (speed.seconds_per_collective + speed.latency_seconds)
        self.busy["context_link"] += seconds
        for link, is_used in ((Link.INTER, between > 0), (Link.INTRA, within > 0)):
            if is_used:
                self.link_free[link] = max(self.now, self.link_free[link]) + seconds
        beside = max(between, within) * work.overlapped_bytes / work.nbytes
        return seconds - min(beside, self.context_work.hiding * self.computation.of(use, is_backward=False))

    def read_norm(self) -> None:
        self.now += sum(self._latency(Direction.CLIMB) for _ in range(GATHERS_OF_NUMBERS))
        self._host_now = self.enqueued

    def _latency(self, direction: Direction) -> float:
        """Seconds of all rounds of a collective between nodes; adds them to `busy`."""
        others = self.grid.nodes - 1
        seconds = self.machine.inter.latency_seconds * (others if direction is Direction.CLIMB else min(1, others))
        self.busy["latency"] += seconds
        return seconds

    def update_on_host(self, numel: int, coming: Sequence[int]) -> None:
        host = self.machine.host
        if host is None:
            return
        self._arrivals += [self._host_link.down(MAIN_BYTES * other, self._host_now) for other in coming]
        updating = numel * self.grid.ranks_per_node / host.values_per_second
        self.busy["host"] += updating
        self._host_now = max(self._host_now, self._arrivals.popleft()) + updating

    def come_up(self, hop: PlannedHop, ready: float) -> float:
        """The time at which a payload that is ready on the host at `ready` is on the device."""
        if self.machine.host is None or hop.host_bytes == 0:
            return ready
        return self._host_link.up(hop.host_bytes, ready)

    def code(self, work: CodecWork) -> float:
        """Seconds that a codec takes for `work`; adds them to `busy`."""
        seconds = self.machine.codec.seconds(work)
        self.busy["codecs"] += seconds
        return seconds

    def transfer(self, hop: PlannedHop, ready: float) -> float:
        """The time at which a hop that is ready at `ready` has crossed its link."""
        machine, traffic, link = self.machine, hop.traffic, hop.lane.link
        ready = self.come_up(hop, ready)
        if traffic.inter_bytes == 0 and traffic.intra_bytes == 0:
            return ready
        efficiency = machine.inter_exchange_efficiency if hop.before.encodes and link is Link.INTER else 1.0
        between = self.grid.into_node(traffic.inter_bytes) / (machine.inter.bytes_per_second * efficiency)
        within = traffic.intra_bytes / machine.intra.bytes_per_second
        speed = machine.inter if link is Link.INTER else machine.intra
        seconds = max(between, within) + speed.seconds_per_collective
        self.busy["inter_link"] += between
        self.busy["intra_link"] += within
        self.link_free[link] = max(ready, self.link_free[link]) + seconds
        return self.link_free[link] + (self._latency(hop.lane.direction) if traffic.inter_bytes else 0.0)


class _StreamClock(_Clock):
    """Lanes on streams: a hop's time is known when it is submitted."""

    def __init__(self, machine: Machine, computation: Computation, job: Job) -> None:
        super().__init__(machine, computation, job)
        self._lane_free = dict.fromkeys(LANES, 0.0)

    def submit(self, hop: PlannedHop, after: _Pending | None) -> _Pending:
        start = max(self.enqueued, self._lane_free[hop.lane], after.end if after is not None else 0.0)
        end = self.transfer(hop, start + self.code(hop.before)) + self.code(hop.after)
        self._lane_free[hop.lane] = end
        return _Pending(end)

    def wait(self, ticket: _Pending) -> None:
        self.now = max(self.now, ticket.end)


class _NoOverlapClock(_StreamClock):
    def submit(self, hop: PlannedHop, after: _Pending | None) -> _Pending:
        pending = super().submit(hop, after)
        self.now = pending.end
        return pending


@dataclass(eq=False)
class _ThreadHop(Times):
    """A hop of the thread's lanes; its times are those of the model."""

    planned: PlannedHop
    after: _ThreadHop | None


class _ThreadClock(_Clock):
    """Lanes whose hops one thread carries out in the order of comm/moves.py, as comm/lanes.py does."""

    def __init__(self, machine: Machine, computation: Computation, job: Job) -> None:
        super().__init__(machine, computation, job)
        self._queues: dict[Lane, deque[_ThreadHop]] = {lane: deque() for lane in LANES}
        self._thread_free = 0.0

    def submit(self, hop: PlannedHop, after: _ThreadHop | None) -> _ThreadHop:
        submitted = _ThreadHop(hop, after, submitted=self.enqueued)
        self._queues[hop.lane].append(submitted)
        return submitted

    def wait(self, ticket: _ThreadHop) -> None:
        while not ticket.has_landed:
            self._move()
        self.now = max(self.now, ticket.landed)

    def compute(self, use: int, *, is_backward: bool) -> None:
        self.now = self.enqueued
        while self._next_start() < self.now:
            self._move()
        super().compute(use, is_backward=is_backward)
        while self._next_start() < self.now:
            before = self.busy["codecs"]
            self._move()
            self.now += self.busy["codecs"] - before

    def _next_start(self) -> float:
        found = first_move(self._queues.values(), self._thread_free)
        return found.start if found is not None else NEVER

    def _move(self) -> None:
        found = first_move(self._queues.values(), self._thread_free)
        if found is None:
            raise RuntimeError("computation waits for a hop that can never land")
        hop = found.hop
        if found.move is Move.LAUNCH:
            hop.launched = found.start
            hop.crossed = self.transfer(hop.planned, found.start)
        elif found.move is Move.LAND:
            self._queues[hop.planned.lane].popleft()
            self._thread_free = hop.landed = found.start + self.code(hop.planned.after)
        else:
            self._thread_free = hop.prepared = found.start + self.code(hop.planned.before)


_CLOCKS: dict[Overlap, type[_StreamClock] | type[_ThreadClock]] = {
    Overlap.STREAMS: _StreamClock,
    Overlap.THREAD: _ThreadClock,
    Overlap.NONE: _NoOverlapClock,
}
