"""Plays the program of a step on a machine, and says how long it takes.

Assumptions:
- A link carries one hop at a time, first come, first served: `bytes / rate`, plus a constant for every collective. Both directions of a
  link share nothing (full duplex), and all ranks of a node send at once, so a hop between nodes costs what enters the node.
- A hop over the inter link occupies the link between nodes, even if its partitions are parts of one node.
- Ranks that share layers or divide samples have priority on their links: what waits for the same link waits so much longer.
- A collective between N nodes also takes the latency of their link once for each of its rounds, one after the other: N - 1 for a gather
  (a ring), 1 for an exchange, in which every node sends to all others at once. Other hops use the link meanwhile. At the end of a step
  numbers are brought to all ranks in log2(N) rounds, rounded up, and nothing runs beside them.
- Overlap.STREAMS: hops run beside computation and do not slow it down, encoding and decoding included (lanes on CUDA streams).
  Overlap.THREAD: one thread encodes, sends, receives and decodes for all lanes on the cores of computation, which stops meanwhile unless it
  waits (lanes on gloo). A payload is sent and received while it crosses its link. Overlap.NONE: every hop is waited for where it is
  submitted.
- Products take time, at a rate that is that of whole steps: so nothing else of the model does, nor an optimizer on the device. Casting and
  copying 16-bit values takes none either; quantizing costs a constant per value, and a Gaussian code another one, and one more for each
  round of its rotation.
- An optimizer on the host of a GPU begins when the host knows the norm, and updates unit after unit, each before its next climb, by the
  thread that enqueues computation. Gradients of the next unit come down meanwhile. Payloads come up before they are gathered; encoding them
  is part of the update. Kept inputs on the host cross the same link.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol

from megatron_zpp.comm.ledger import Traffic
from megatron_zpp.comm.moves import NEVER, Move, Times, first_move
from megatron_zpp.ops.planned import CodecWork
from megatron_zpp.parallel.gathers import rounds
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import LADDER_LINKS, LANES, Direction, Lane, Link
from megatron_zpp.training.plan.machine import LinkSpeed, Machine, Overlap
from megatron_zpp.training.plan.program import (
    COMPUTATION,
    Arrived,
    Await,
    ComeDown,
    Compute,
    Copy,
    Cross,
    Follow,
    GatherNumbers,
    Item,
    Mark,
    Submit,
    UpdateOnHost,
    Wait,
)

RECORDED_MICROBATCHES = 3  # the first, one between, and the last


@dataclass(frozen=True)
class StepTime:
    """Seconds that one step takes, and for how many of them each part of the machine is busy."""

    seconds: float
    computing: float
    inter_link: float
    intra_link: float
    codecs: float
    sockets: float = 0.0
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
            "sending and receiving": self.sockets,
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


class Step(Protocol):
    """What a clock needs of a planned step. items: of a step of so many micro-batches, RECORDED_MICROBATCHES at most."""

    @property
    def microbatches(self) -> int: ...

    def items(self, microbatches: int) -> Iterable[Item]: ...


def step_time(step: Step, grid: Grid, machine: Machine) -> StepTime:
    """The time of a step in the middle of a run: its first climbs were submitted in the step before."""
    clock = _CLOCKS[machine.overlap](machine, grid)

    def again(microbatches: int) -> StepTime:
        before = clock.reading()
        clock.play(step.items(microbatches))
        return clock.reading() - before

    recorded = min(step.microbatches, RECORDED_MICROBATCHES)
    again(recorded)
    found = again(recorded)
    return found if recorded == step.microbatches else found.plus(step.microbatches - recorded, found - again(recorded - 1))


BUSY = tuple(field.name for field in fields(StepTime) if field.name != "seconds")


class _Clock:
    """Time on one rank. free: when each stream has done what it was given; `now` is that of computation. busy: seconds of each part.

    The host of a device enqueues work at once, except while it updates weights: until `_host_now`.
    """

    def __init__(self, machine: Machine, grid: Grid) -> None:
        self.machine = machine
        self.grid = grid
        self.free: defaultdict[int, float] = defaultdict(float)
        self.busy = dict.fromkeys(BUSY, 0.0)
        self.link_free = dict.fromkeys(LADDER_LINKS, 0.0)
        self._marks: defaultdict[int, list[float]] = defaultdict(list)
        self._host_now = 0.0
        self._arrivals: list[float] = []  # when gradients are on the host
        self._host_link_free = {True: 0.0, False: 0.0}  # down, up
        self._play: dict[type[Any], Callable[[Any], object]] = {
            Compute: self.compute,
            Cross: self._cross,
            Copy: self._copy,
            Mark: lambda item: self._marks[item.stream].append(self.free[item.stream]),
            Await: self._await,
            Follow: lambda item: self._wait_until(item.stream, self.free[item.other]),
            Submit: self.submit,
            Wait: self.wait,
            GatherNumbers: self._gather_numbers,
            ComeDown: lambda item: self._arrivals.append(self._over_host_link(item.nbytes, self._host_now, down=True)),
            Arrived: self._arrived,
            UpdateOnHost: self._update_on_host,
        }

    def play(self, items: Iterable[Item]) -> None:
        for item in items:
            act = self._play.get(type(item))
            if act is not None:
                act(item)

    def reading(self) -> StepTime:
        return StepTime(self.now, **self.busy)

    @property
    def now(self) -> float:
        return self.free[COMPUTATION]

    @now.setter
    def now(self, time: float) -> None:
        self.free[COMPUTATION] = time

    @property
    def enqueued(self) -> float:
        """The earliest time at which what the host enqueues next can begin."""
        return max(self.now, self._host_now)

    # ---- the model

    def compute(self, item: Compute) -> None:
        seconds = item.flops / self.machine.flops_per_second
        self.busy["computing"] += seconds
        self.now = self.enqueued + seconds

    def _cross(self, item: Cross) -> None:
        """A collective of ranks that share layers or divide samples."""
        machine, traffic = self.machine, item.traffic
        if item.lane.link is Link.TENSOR:
            link = machine.tensor_link
            seconds = traffic.tensor_bytes / link.bytes_per_second + link.seconds_per_collective
            part, used = "tensor_link", {Link.INTRA}
        else:
            between = self.grid.into_node(traffic.context_inter_bytes) / machine.inter.bytes_per_second
            within = (traffic.context_bytes - traffic.context_inter_bytes) / machine.intra.bytes_per_second
            link = machine.inter if between else machine.intra
            seconds = max(between, within) + link.seconds_per_collective + link.latency_seconds
            part, used = "context_link", {link for link, is_used in ((Link.INTER, between > 0), (Link.INTRA, within > 0)) if is_used}
        self.busy[part] += seconds
        start = max(self.free[item.stream], self._host_now)
        self.free[item.stream] = start + seconds
        for other in used:
            self.link_free[other] = max(start, self.link_free[other]) + seconds

    def _await(self, item: Await) -> None:
        place = len(self._marks[item.marked]) - 1 - item.back
        if place >= 0:  # otherwise it is of an earlier step
            self._wait_until(item.stream, self._marks[item.marked][place])

    def _wait_until(self, stream: int, time: float) -> None:
        self.free[stream] = max(self.free[stream], time)

    # ---- the host

    def _copy(self, item: Copy) -> None:
        self.free[item.stream] = self._over_host_link(item.nbytes, max(self.free[item.stream], self._host_now), down=item.down)

    def _over_host_link(self, nbytes: int, ready: float, *, down: bool) -> float:
        """The time at which a copy has ended that can begin at `ready`. Each direction carries one at a time."""
        if self.machine.host is None:
            return ready
        seconds = nbytes / self.machine.host.bytes_per_second
        self.busy["host_link"] += seconds
        self._host_link_free[down] = max(ready, self._host_link_free[down]) + seconds
        return self._host_link_free[down]

    def _arrived(self, item: Arrived) -> None:
        place = len(self._arrivals) - 1 - item.back
        if place >= 0:
            self._host_now = max(self._host_now, self._arrivals[place])

    def _update_on_host(self, item: UpdateOnHost) -> None:
        if self.machine.host is not None:
            seconds = item.numel * self.grid.ranks_per_node / self.machine.host.values_per_second
            self.busy["host"] += seconds
            self._host_now += seconds

    def _gather_numbers(self, item: GatherNumbers) -> None:
        self.now += self._latency(rounds(self.grid.nodes))
        self._host_now = self.enqueued

    def _latency(self, rounds: int) -> float:
        """Seconds of all rounds of a collective between nodes; adds them to `busy`."""
        seconds = self.machine.inter.latency_seconds * rounds
        self.busy["latency"] += seconds
        return seconds

    def _rounds(self, direction: Direction) -> int:
        """Of a hop between nodes."""
        others = self.grid.nodes - 1
        return others if direction is Direction.CLIMB else min(1, others)

    # ---- hops

    def submit(self, item: Submit) -> None:
        raise NotImplementedError

    def wait(self, item: Wait) -> None:
        raise NotImplementedError

    def code(self, work: CodecWork) -> float:
        """Seconds that a codec takes for `work`; adds them to `busy`."""
        speed = vars(self.machine.codec)
        seconds: float = sum(count * speed[kind] for kind, count in vars(work).items() if count)
        self.busy["codecs"] += seconds
        return seconds

    def transfer(self, hop: Submit, ready: float) -> float:
        """The time at which a hop that is ready at `ready` has crossed its link."""
        machine, traffic, link = self.machine, hop.traffic, hop.lane.link
        if hop.host_bytes:
            ready = self._over_host_link(hop.host_bytes, ready, down=False)
        if traffic == Traffic():
            return ready
        efficiency = machine.inter_exchange_efficiency if hop.before.encodes and link is Link.INTER else 1.0
        between = self.grid.into_node(traffic.inter_bytes) / (machine.inter.bytes_per_second * efficiency)
        within = traffic.intra_bytes / machine.intra.bytes_per_second
        speed: LinkSpeed = machine.inter if link is Link.INTER else machine.intra
        seconds = max(between, within) + speed.seconds_per_collective
        self.busy["inter_link"] += between
        self.busy["intra_link"] += within
        self.link_free[link] = max(ready, self.link_free[link]) + seconds
        return self.link_free[link] + (self._latency(self._rounds(hop.lane.direction)) if traffic.inter_bytes else 0.0)


class _StreamClock(_Clock):
    """Lanes on streams: a hop's time is known when it is submitted."""

    def __init__(self, machine: Machine, grid: Grid) -> None:
        super().__init__(machine, grid)
        self._ends: dict[Lane, list[float]] = {lane: [0.0] for lane in LANES}

    def submit(self, item: Submit) -> None:
        follows = self._end_of(item.follows_on, item.follows) if item.follows_on is not None else 0.0
        start = max(self.enqueued, self._ends[item.lane][-1], follows)
        self._ends[item.lane].append(self.transfer(item, start + self.code(item.before)) + self.code(item.after))

    def wait(self, item: Wait) -> None:
        self._wait_until(COMPUTATION, self._end_of(item.lane, item.back))

    def _end_of(self, lane: Lane, back: int) -> float:
        ends = self._ends[lane]
        return ends[-1 - back] if back < len(ends) else 0.0


class _NoOverlapClock(_StreamClock):
    def submit(self, item: Submit) -> None:
        super().submit(item)
        self.now = self._ends[item.lane][-1]


@dataclass(eq=False)
class _ThreadHop(Times):
    """A hop of the thread's lanes; its times are those of the model."""

    item: Submit
    after: _ThreadHop | None


class _ThreadClock(_Clock):
    """Lanes whose hops one thread carries out in the order of comm/moves.py, as comm/lanes.py does."""

    def __init__(self, machine: Machine, grid: Grid) -> None:
        super().__init__(machine, grid)
        self._queues: dict[Lane, deque[_ThreadHop]] = {lane: deque() for lane in LANES}
        self._all: dict[Lane, list[_ThreadHop]] = {lane: [] for lane in LANES}
        self._thread_free = 0.0

    def submit(self, item: Submit) -> None:
        after = self._hop_at(item.follows_on, item.follows) if item.follows_on is not None else None
        hop = _ThreadHop(item, after, submitted=self.enqueued)
        self._queues[item.lane].append(hop)
        self._all[item.lane].append(hop)

    def wait(self, item: Wait) -> None:
        hop = self._hop_at(item.lane, item.back)
        if hop is None:
            return
        while not hop.has_landed:
            self._move()
        self._wait_until(COMPUTATION, hop.landed)

    def compute(self, item: Compute) -> None:
        self.now = self.enqueued
        while self._next_start() < self.now:
            self._move()
        super().compute(item)
        while self._next_start() < self.now:
            self.now += self._move()

    def _hop_at(self, lane: Lane, back: int) -> _ThreadHop | None:
        """A hop of this step or of an earlier one; None if it is of a step before the first that is played."""
        hops = self._all[lane]
        return hops[-1 - back] if back < len(hops) else None

    def _next_start(self) -> float:
        found = first_move(self._queues.values(), self._thread_free)
        return found.start if found is not None else NEVER

    def _move(self) -> float:
        """The seconds for which the thread has worked."""
        found = first_move(self._queues.values(), self._thread_free)
        if found is None:
            raise RuntimeError("computation waits for a hop that can never land")
        hop, seconds = found.hop, 0.0
        if found.move is Move.LAUNCH:
            hop.launched = found.start
            seconds = self._socket(hop.item)
            self._thread_free = found.start + seconds
            hop.crossed = max(self._thread_free, self.transfer(hop.item, found.start))
        elif found.move is Move.LAND:
            self._queues[hop.item.lane].popleft()
            seconds = self.code(hop.item.after)
            self._thread_free = hop.landed = found.start + seconds
        else:
            seconds = self.code(hop.item.before)
            self._thread_free = hop.prepared = found.start + seconds
        return seconds

    def _socket(self, item: Submit) -> float:
        """Seconds that the cores take to send and receive a payload; adds them to `busy`."""
        socket, traffic = self.machine.socket, item.traffic
        per_byte = socket.gathered if item.lane.direction is Direction.CLIMB else socket.exchanged
        seconds = (traffic.inter_bytes + traffic.intra_bytes) * per_byte
        self.busy["sockets"] += seconds
        return seconds


_CLOCKS: dict[Overlap, type[_StreamClock] | type[_ThreadClock]] = {
    Overlap.STREAMS: _StreamClock,
    Overlap.THREAD: _ThreadClock,
    Overlap.NONE: _NoOverlapClock,
}
