"""Streams, collectives, lanes and a ledger that move nothing, and write down what they are asked for (training/plan/program.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from megatron_zpp.comm.backend import Work
from megatron_zpp.comm.lanes import Hop, Lanes
from megatron_zpp.comm.ledger import Category, Ledger, Traffic, link_traffic
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.moves import NEVER
from megatron_zpp.comm.staging import Staging
from megatron_zpp.ops.planned import CodecWork, listening
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import ACROSS_LANES, LANES, MOST_CROSSING, Direction, Lane
from megatron_zpp.training.plan.kinds import CODED, KEPT_INPUTS, MAIN_WEIGHTS, PINNED
from megatron_zpp.training.plan.live_memory import LiveMemory
from megatron_zpp.training.plan.program import (
    COMPUTATION,
    Arrived,
    Await,
    Booked,
    Compute,
    Cross,
    Follow,
    GatherNumbers,
    Item,
    Mark,
    Submit,
    Wait,
)

META = torch.device("meta")


@dataclass
class HopWork:
    """What one hop has to do before or after its collective. come_up: bytes from the host."""

    codec: CodecWork = CodecWork()
    come_up: int = 0

    def add(self, codec: CodecWork) -> None:
        self.codec += codec


class Recorder:
    """Where items are written to: `items`, of the part that is under way. marks: by stream, how many there are so far.

    notes_streams: whether streams are told apart. Those of the engine's lanes are not: a hop is one item.
    """

    def __init__(self, *, notes_streams: bool) -> None:
        self.items: list[Item] = []
        self.marks: dict[int, int] = {}
        self.notes_streams = notes_streams
        self.stream = COMPUTATION
        self.of_hop: HopWork | None = None
        self.came_down: dict[int, int] = {}  # by stream, how many copies have gone to the host

    def mark(self, stream: int) -> int:
        """Marks a stream; returns the number of the mark."""
        self.marks[stream] = self.marks.get(stream, 0) + 1
        if self.notes_streams:
            self.items.append(Mark(stream))
        return self.marks[stream]

    def wait(self, stream: int, marked: int, number: int) -> None:
        """`stream` waits for mark `number` of another one."""
        if self.notes_streams and stream != marked:
            self.items.append(Await(stream, marked, self.marks[marked] - number))

    @contextmanager
    def counting(self) -> Iterator[HopWork]:
        """Counts what a hop has to do inside the block."""
        work = self.of_hop = HopWork()
        try:
            with listening(work.add):
                yield work
        finally:
            self.of_hop = None

    def follow(self, stream: int, other: int) -> None:
        if self.notes_streams and stream != other:
            self.items.append(Follow(stream, other))

    def compute(self, flops: float) -> None:
        """Products in the stream of computation."""
        last = self.items[-1] if self.items else None
        if isinstance(last, Compute):
            self.items[-1] = Compute(last.flops + flops)
        else:
            self.items.append(Compute(flops))


# ---- streams


@dataclass(frozen=True)
class RecordedEvent:
    """Mark `number` of a stream."""

    stream: RecordedStream
    number: int
    came_down: int

    def synchronize(self) -> None:
        recorder = self.stream.recorder
        if self.came_down > 0:
            recorder.items.append(Arrived(recorder.came_down[self.stream.number] - self.came_down))


@dataclass(frozen=True)
class RecordedStream:
    """A stream of the device that is planned."""

    recorder: Recorder = field(compare=False)
    number: int

    def record_event(self) -> RecordedEvent:
        return RecordedEvent(self, self.recorder.mark(self.number), self.recorder.came_down.get(self.number, 0))

    def wait_event(self, event: RecordedEvent) -> None:
        self.recorder.wait(self.number, event.stream.number, event.number)

    def wait_stream(self, stream: RecordedStream) -> None:
        self.recorder.follow(self.number, stream.number)

    def synchronize(self) -> None: ...


class RecordedStreams:
    """The streams of the device that is planned. live: counts the memory of its host."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._streams = [RecordedStream(recorder, COMPUTATION)]
        self._current = self._streams[0]
        self.live: LiveMemory | None = None

    def make(self, *, is_urgent: bool = False) -> RecordedStream:
        self._streams.append(RecordedStream(self._recorder, len(self._streams)))
        return self._streams[-1]

    def current(self) -> RecordedStream:
        return self._current

    @contextmanager
    def entered(self, stream: RecordedStream) -> Iterator[None]:
        before = self._current
        self._current, self._recorder.stream = stream, stream.number
        try:
            yield
        finally:
            self._current, self._recorder.stream = before, before.number

    def synchronize(self) -> None: ...

    def host_memory(self, numel: int, dtype: torch.dtype, *, is_pinned: bool = True) -> Tensor:
        if self.live is None or dtype is torch.float64:  # a few numbers for the host
            return torch.zeros(numel, dtype=dtype, device=META)
        kind = self.live.kind if self.live.kind == KEPT_INPUTS else PINNED if is_pinned else MAIN_WEIGHTS
        with self.live.of_kind(kind, on_host=True):
            return torch.zeros(numel, dtype=dtype, device=META)


class PlannedStaging(Staging):
    """The buffers of a plan. kind: of their memory, which `live` counts; None: it does not."""

    def __init__(self, streams: RecordedStreams | None, kind: str | None) -> None:
        super().__init__(META, streams)
        self.live: LiveMemory | None = None
        self._kind = kind

    def take(self, nbytes: int) -> Tensor:
        if self.live is None:
            return super().take(nbytes)
        with self.live.of_kind(self._kind):
            return super().take(nbytes)


# ---- collectives


class RecordedBackend:
    """Collectives of rank 0 that carry nothing. Those of lanes across ladders and samples are items; those of hops belong to the hops."""

    def __init__(self, grid: Grid, recorder: Recorder, *, has_streams: bool) -> None:
        self.grid = grid
        self.rank = 0
        self._recorder = recorder
        self._has_streams = has_streams

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        return self._cross(lane, own.numel())

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        return self._cross(lane, sent.numel() // self.grid.link_ranks(lane.link))

    def gather_world(self, own: Tensor) -> Tensor:
        self._recorder.items.append(GatherNumbers())
        return own.new_empty(self.grid.data_ranks, self.grid.tensor_ranks, own.numel())

    def _cross(self, lane: Lane, bytes_per_member: int) -> Work | None:
        if lane not in ACROSS_LANES:
            return None
        recorder, traffic = self._recorder, link_traffic(self.grid, self.rank, lane.link, bytes_per_member)
        if self._has_streams:
            recorder.items.append(Cross(recorder.stream, lane, traffic))
            return None
        stream = -1 - ACROSS_LANES.index(lane)  # of a thread that carries this lane alone
        recorder.items += [Follow(stream, COMPUTATION), Cross(stream, lane, traffic)]
        return _Crossing(recorder, stream, recorder.mark(stream))


@dataclass(frozen=True)
class _Crossing:
    recorder: Recorder
    stream: int
    number: int

    def wait(self) -> None:
        self.recorder.wait(COMPUTATION, self.stream, self.number)

    def when_ended(self, call: Callable[[], None]) -> None:
        call()


class RecordedLedger(Ledger):
    """A ledger whose bookings are items, too."""

    def __init__(self, grid: Grid, recorder: Recorder) -> None:
        super().__init__(grid, 0)
        self._recorder = recorder

    def book(self, category: Category, traffic: Traffic) -> None:
        super().book(category, traffic)
        if traffic != Traffic():
            self._recorder.items.append(Booked(category, traffic))


# ---- lanes


class NoLanes:
    """Of a rank without an engine."""

    def submit(self, hop: Hop) -> None:
        raise RuntimeError("no engine submits hops here")

    def wait(self, hop: Hop) -> None: ...

    def drain(self) -> None: ...


class RecordedLanes:
    """Lanes that note hops and waits, and carry hops out so that as much memory is taken as can be.

    live: counts what codecs make beside payloads as CODED.
    """

    def __init__(self, recorder: Recorder, live: LiveMemory) -> None:
        self._recorder = recorder
        self._live = live
        self._index: WeakKeyDictionary[Hop, int] = WeakKeyDictionary()  # of each hop on its lane
        self._submitted = dict.fromkeys(LANES, 0)
        self._has_waited: WeakSet[Hop] = WeakSet()
        self._items: WeakKeyDictionary[Hop, Submit] = WeakKeyDictionary()

    def submit(self, hop: Hop) -> None:
        item = Submit(hop.lane, hop.traffic, hop.name)
        if hop.after is not None:
            item.follows_on, item.follows = hop.after.lane, self._back(hop.after)
        self._items[hop] = item
        self._index[hop] = self._submitted[hop.lane]
        self._submitted[hop.lane] += 1
        self._recorder.items.append(item)
        self.carry_out(hop)

    def wait(self, hop: Hop) -> None:
        if hop not in self._has_waited:
            self._has_waited.add(hop)
            self._recorder.items.append(Wait(hop.lane, self._back(hop)))
        self.land(hop)

    def carry_out(self, hop: Hop) -> None:
        """Does what a lane does as soon as it can."""
        raise NotImplementedError

    def land(self, hop: Hop) -> None:
        """Does what is left of a hop."""

    def drain(self) -> None: ...

    def _back(self, hop: Hop) -> int:
        return self._submitted[hop.lane] - 1 - self._index[hop]

    def _prepare(self, hop: Hop) -> None:
        item = self._items[hop]
        with self._recorder.counting() as work, self._live.of_kind(CODED):
            hop.prepare()
        item.before, item.host_bytes = work.codec, work.come_up
        hop.prepared = 0.0

    def _launch(self, hop: Hop) -> None:
        hop.launch()
        hop.launched = 0.0

    def _land(self, hop: Hop) -> None:
        with self._recorder.counting() as work, self._live.of_kind(CODED):
            hop.land()
        self._items[hop].after = work.codec
        hop.landed = 0.0


class RecordedStreamLanes(RecordedLanes):
    """As lanes on streams: all of a hop is enqueued when it is submitted."""

    def __init__(self, recorder: Recorder, live: LiveMemory, streams: RecordedStreams) -> None:
        super().__init__(recorder, live)
        self._streams = streams
        self._of_lane = {lane: streams.make(is_urgent=True) for lane in LANES}

    def carry_out(self, hop: Hop) -> None:
        with self._streams.entered(self._of_lane[hop.lane]):
            self._prepare(hop)
            self._launch(hop)
            self._land(hop)


class RecordedThreadLanes(RecordedLanes):
    """As the lanes of a thread whose links are so slow that every hop is waited for: what can begin has begun, and nothing has ended.

    fast_at_first: of climbs or descents in these directions only the last hop is slow.
    """

    def __init__(self, recorder: Recorder, live: LiveMemory) -> None:
        super().__init__(recorder, live)
        self.fast_at_first: Set[Direction] = frozenset()
        self._queues: dict[Lane, deque[Hop]] = {lane: deque() for lane in LANES}

    def carry_out(self, hop: Hop) -> None:
        self._queues[hop.lane].append(hop)
        self._begin_all()
        if hop.after is not None and hop.lane.direction in self.fast_at_first:
            self.land(hop.after)
            self._begin_all()

    def land(self, hop: Hop) -> None:
        while not hop.has_landed:
            first = self._queues[hop.lane][0]
            if first.after is not None:
                self.land(first.after)
                self._begin_all()
            self._queues[hop.lane].popleft()
            self._land(first)
            self._begin_all()

    def drain(self) -> None:
        for queue in self._queues.values():
            while queue:
                self.land(queue[-1])

    def _begin_all(self) -> None:
        """Prepares and launches what the rules of comm/lanes.py allow."""
        for queue in self._queues.values():
            for hop in islice(queue, MOST_CROSSING + 1):
                if hop.prepared == NEVER:
                    if hop.after is not None and not hop.after.has_landed:
                        break
                    self._prepare(hop)
                if hop.launched == NEVER:
                    self._launch(hop)  # of the last one: once the first has crossed, and before it has landed (comm/moves.py)


# ---- the links of a rank


def recorded_links(grid: Grid, recorder: Recorder, lanes: Lanes, streams: RecordedStreams | None, staging: PlannedStaging) -> Links:
    """The links of rank 0. streams: None on a CPU."""
    backend = RecordedBackend(grid, recorder, has_streams=streams is not None)
    return Links(backend, lanes, RecordedLedger(grid, recorder), META, streams, staging=staging)
