"""Runs steps of the engine under a recorded model, and notes what they send and the most memory that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.comm.links import Links
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.ops.device_kind import standing_for
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Direction
from megatron_zpp.training.plan.hollow_model import HollowModel, Player
from megatron_zpp.training.plan.kinds import (
    ACTIVATIONS,
    CODED,
    COPY,
    GATHERED,
    GRADIENTS,
    MAIN_WEIGHTS,
    MIRRORS,
    MOMENTS,
    OPTIMIZER,
    OTHER,
    OUTER,
    PAYLOADS,
    WEIGHTS,
)
from megatron_zpp.training.plan.live_memory import LiveMemory, Workspace
from megatron_zpp.training.plan.model_record import Event, ModelRecord, Part
from megatron_zpp.training.plan.operators import Operators
from megatron_zpp.training.plan.program import Segment
from megatron_zpp.training.plan.recorder import (
    PlannedStaging,
    RecordedLanes,
    RecordedStreamLanes,
    RecordedStreams,
    RecordedThreadLanes,
    Recorder,
    recorded_links,
)
from megatron_zpp.training.step import row_of
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.policy import Rung
from megatron_zpp.zero.unit import WeightUnit


@dataclass(frozen=True)
class Peak:
    """The most bytes that existed at once, by kind. moment: when."""

    total: int
    by_kind: Mapping[str, int]
    moment: str


@dataclass(frozen=True)
class StepRecord:
    """What the engine does and takes under a model.

    segments: of one step in the middle of a run. peaks: by whether the activations of each span of uses are kept at that time.
    on_host: the most bytes in memory of a host that is not the device, by kind. states, host_states: by unit and kind, what it keeps at the
    end of the last backward.
    """

    segments: list[Segment]
    peaks: Mapping[tuple[bool, ...], Peak]
    on_host: Mapping[str, int]
    states: Mapping[str, Counter[str]]
    host_states: Mapping[str, Counter[str]]


class PlannedOuter(NamedTuple):
    """Outer steps beside the engine. grid: of the ranks that have the same place on each island. due: the units exchanged, by number."""

    options: OuterOptions
    grid: Grid
    due: tuple[int, ...]


class _SegmentObserver(Observer):
    """Begins a segment with every use."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.segments: list[Segment] = []
        self.microbatch: int | None = 0

    def begin_unit(self, verb: str, name: str) -> None:
        self.begin(verb, name)

    def begin(self, verb: str, name: str = "") -> None:
        segment = Segment(self.microbatch, verb, name)
        self.segments.append(segment)
        self._recorder.items = segment.items

    @property
    def moment(self) -> str:
        return f"{self.segments[-1].verb} {self.segments[-1].name}".strip() if self.segments else "start"


class EngineRun:
    """An engine on tensors without values. spans: uses, in each of which the activations are kept at the same time.

    evaluation: the record of a forward without gradients, which follows every step. outer: None without outer steps. They count in memory,
    and the segments are those of a step without an exchange.
    """

    def __init__(
        self,
        record: ModelRecord,
        options: EngineOptions,
        grid: Grid,
        workspace: Workspace,
        spans: Sequence[range],
        evaluation: ModelRecord | None = None,
        outer: PlannedOuter | None = None,
    ) -> None:
        self._record = self._played = record
        self._evaluation = evaluation
        self._planned_outer = outer
        self._outer: OuterSteps | None = None
        self._spans = spans
        self._workspace = workspace
        self.recorder = recorder = Recorder(notes_streams=False)
        self._observer = _SegmentObserver(recorder)
        self._peaks: dict[tuple[bool, ...], Peak] = {}
        self._host_peak: Counter[str] = Counter()
        self._external = sum(record.lasting.values())
        self._most_coded = 0
        self._held = [False] * len(spans)
        self._states: dict[str, Counter[str]] = {}
        self._host_states: dict[str, Counter[str]] = {}
        operators = Operators(recorder)
        self._live = operators.live = LiveMemory(workspace, self._at_peak, operators)
        self._player = Player(self._on_part)
        self._options = options
        self._grid = grid

    def run(self, microbatches: int) -> StepRecord:
        """A step of so many micro-batches, after short ones, which leave buffers behind."""
        recorder, live, observer = self.recorder, self._live, self._observer
        links = self._links_of(self._grid, recorder)
        lanes = links.lanes
        model = HollowModel(self._record, self._player, lambda: live.of_kind(None))
        with standing_for(self._workspace.device_type), live, live.of_kind(OTHER):
            options = EngineOptions(**{**vars(self._options), "observer": observer})
            engine = ZeroEngine(model, self._record.units, self._record.uses, options, links)
            for unit, gradient, moments in zip(engine.units, engine.gradients, engine.optimizer.moments, strict=True):
                self._name_states(unit, _sums_of(gradient), list(moments.values()))
            if self._planned_outer is not None:
                # What the recorder of the column writes down is not part of the step.
                column = self._links_of(self._planned_outer.grid, Recorder(notes_streams=False))
                self._outer = OuterSteps(engine, column, self._planned_outer.options)
                live.name((tensor for unit in filter(None, self._outer.units) for tensor in unit.live_tensors()), OUTER)
            self._peaks.clear()  # a unit has no storage of its own when the next one is made; until now they were counted together
            self._step(engine, model, 1)
            if self._options.full_precision_iterations > 0:
                self._exchange(engine, model)  # in the largest payloads
            if isinstance(lanes, RecordedThreadLanes):  # in a long run each link is the slowest at some time
                for directions in ({Direction.CLIMB}, {Direction.DESCEND}, {Direction.CLIMB, Direction.DESCEND}):
                    lanes.fast_at_first = directions
                    self._step(engine, model, 1)
                lanes.fast_at_first = frozenset()
            observer.segments.clear()
            self._step(engine, model, microbatches)
            segments = list(observer.segments)
            self._exchange(engine, model)
            self._evaluate(model)
            recorder.items = []
            if self._outer is not None:
                self._outer.close()
            engine.close()
        return StepRecord(segments, self._peaks, self._host_peak, self._states, self._host_states)

    def _links_of(self, grid: Grid, recorder: Recorder) -> Links:
        """Links of rank 0 whose buffers are counted."""
        streams = RecordedStreams(recorder) if self._workspace.is_on_gpu else None
        lanes: RecordedLanes
        if streams is None:
            lanes = RecordedThreadLanes(recorder, self._live)
        else:
            streams.live = self._live
            lanes = RecordedStreamLanes(recorder, self._live, streams)
        staging = PlannedStaging(streams, PAYLOADS)
        staging.live = self._live
        return recorded_links(grid, recorder, lanes, streams, staging)

    def _exchange(self, engine: ZeroEngine, model: HollowModel) -> None:
        """An outer step, and a step in whose forward its exchanges end, or after which."""
        if self._outer is not None and self._planned_outer is not None:
            self._observer.begin("outer step")
            self._outer.exchange(self._planned_outer.due)
            self._step(engine, model, 1)

    def _step(self, engine: ZeroEngine, model: HollowModel, microbatches: int) -> None:
        observer = self._observer
        for microbatch in range(microbatches):
            observer.microbatch = microbatch
            self._begin(self._record)
            loss = model()
            engine.backward(loss, microbatches=microbatches, is_last_microbatch=microbatch == microbatches - 1)
            self._player.play_all()
            del loss
        observer.microbatch = None
        observer.begin("update")
        for unit in engine.units:
            self._live.name((tensor for tensor in unit.live_tensors() if not self._is_full(unit, tensor)), COPY)
        self._note_states(engine)
        engine.finish_gradients()
        engine.update(1e-3, report=row_of([0.0], engine.device))

    def _evaluate(self, model: HollowModel) -> None:
        if self._evaluation is not None:
            self._begin(self._evaluation)
            with torch.no_grad():
                model()
            self._player.play_all()

    def _begin(self, record: ModelRecord) -> None:
        """Begins a micro-batch of this record."""
        self._played, self._external = record, sum(record.lasting.values())
        self._player.begin(record)

    def _note_states(self, engine: ZeroEngine) -> None:
        outer = {unit.inner.name: unit.live_tensors() for unit in filter(None, self._outer.units if self._outer is not None else ())}
        for unit, gradient, moments in zip(engine.units, engine.gradients, engine.optimizer.moments, strict=True):
            rungs = [tensor for tensor in unit.live_tensors() if not self._is_full(unit, tensor) or self._keeps_full]
            tensors = [*rungs, *unit.tensors_at_home(), *_sums_of(gradient), *moments.values(), *outer.get(unit.name, ())]
            self._states[unit.name], self._host_states[unit.name] = self._live.bytes_of(tensors)

    def _name_states(self, unit: WeightUnit, gradients: Sequence[Tensor], moments: Sequence[Tensor]) -> None:
        live = self._live
        is_on_host = live.is_on_host(unit.main_weight)
        main, *mirror = unit.tensors_at_home()
        live.name([main], MAIN_WEIGHTS if is_on_host else WEIGHTS)
        live.name(mirror, MIRRORS if is_on_host else COPY)
        live.name(gradients, GRADIENTS)
        live.name(moments, MOMENTS if is_on_host else OPTIMIZER)
        for tensor in unit.live_tensors():
            if self._is_full(unit, tensor):
                live.resizable([tensor], WEIGHTS if self._keeps_full else GATHERED)
            else:
                live.name([tensor], COPY)

    @property
    def _keeps_full(self) -> bool:
        return self._options.policy.weights_in_step is Rung.FULL

    @staticmethod
    def _is_full(unit: WeightUnit, tensor: Tensor) -> bool:
        return tensor is unit._full

    def _on_part(self, part: Part) -> None:
        self.recorder.items += part.items
        mark = part.mark
        for index, span in enumerate(self._spans):
            if mark.event is Event.FORWARD and mark.use in span:
                self._held[index] = self._played is self._record  # evaluation keeps none
            elif mark.event is Event.BACKWARD and mark.use < span.start:
                self._held[index] = False
        self._note(self._external + part.peak)
        self._external += part.change

    def _at_peak(self, workspace: int) -> None:
        self._note(self._external + workspace)

    def _note(self, beside: int) -> None:
        live, held = self._live, tuple(self._held)
        coded = live.by_kind[CODED]
        if not self._workspace.is_on_gpu:  # the thread of the lanes may make them at any time
            coded = self._most_coded = max(coded, self._most_coded)
        total = live.total - live.by_kind[CODED] + coded + live.resized_total + beside
        known = self._peaks.get(held)
        if known is None or total >= known.total:  # of equal ones the last, when what lasts has its name
            kinds = live.now()
            kinds.update(self._played.lasting)
            kinds[ACTIVATIONS] += beside - sum(self._played.lasting.values())
            kinds[OTHER] += coded
            del kinds[CODED]
            self._peaks[held] = Peak(total, kinds, self._observer.moment)
        if live.total_on_host + self._played.lasting_on_host.total() > self._host_peak.total():
            self._host_peak = live.on_host + self._played.lasting_on_host


def _sums_of(gradient: UnitGradient) -> list[Tensor]:
    return [gradient.total, *gradient.primary.parts(), *gradient.regions.parts()]
