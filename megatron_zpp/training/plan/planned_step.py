"""Plans a step: a real step of one rank on a machine that computes nothing, with fewer layers (training/plan/repeats.py).

The model is run without an engine, and the engine under a model that plays what the first run recorded. Memory, bytes and the program of
the step come from these two runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.comm.links import Ladder
from megatron_zpp.config.schema import Config
from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.model.shapes import InitialValues
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.ops.device_kind import standing_for
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.kept_inputs import build_kept_inputs
from megatron_zpp.training.plan.live_memory import LiveMemory, Workspace
from megatron_zpp.training.plan.model_record import Event, ModelRecord, record_model
from megatron_zpp.training.plan.program import Booked, Cross, Item, Segment, Submit
from megatron_zpp.training.plan.recorder import META, NoLanes, RecordedBackend, RecordedLedger, RecordedStreams, Recorder
from megatron_zpp.training.plan.repeats import Repeat, without_repeats
from megatron_zpp.training.plan.step_record import RECORDED_MICROBATCHES, EngineRun, StepRecord
from megatron_zpp.training.setup import build_model, engine_options, working_dtype
from megatron_zpp.training.sharding import prefetch_of
from megatron_zpp.training.step import microbatch_loss

KEPT_INPUTS = "inputs of recomputed chunks"


@dataclass(frozen=True)
class PlannedMemory:
    """The most bytes of a rank's tensors at once, by kind: on its device, at `moment`, and on a host that is not the device."""

    on_device: Mapping[str, int]
    on_host: Mapping[str, int]
    moment: str

    @property
    def total(self) -> int:
        return sum(self.on_device.values())


@dataclass(frozen=True)
class PlannedStep:
    """A step of one rank, planned. microbatches: of the step. repeats: layers that stand for others."""

    model: ModelRecord
    engine: StepRecord
    repeats: tuple[Repeat, ...]
    microbatches: int

    @cached_property
    def memory(self) -> PlannedMemory:
        found = [self._peak(held) for held in self.engine.peaks]
        return max(found, key=lambda peak: peak.total)

    def _peak(self, held: tuple[bool, ...]) -> PlannedMemory:
        """The peak while the activations of these repeated layers are kept, or are not."""
        peak = self.engine.peaks[held]
        on_device, on_host = Counter(peak.by_kind), Counter(self.engine.on_host)
        for repeat, is_held in zip(self.repeats, held, strict=True):
            for unit in repeat.units:
                for kind, nbytes in self.engine.states[unit].items():
                    on_device[kind] += repeat.times * nbytes
                for kind, nbytes in self.engine.host_states[unit].items():
                    on_host[kind] += repeat.times * nbytes
            if is_held:
                on_device["activations"] += repeat.times * self._kept_by(repeat)
        return PlannedMemory(on_device, on_host, peak.moment)

    def _kept_by(self, repeat: Repeat) -> int:
        """Bytes that forward of these uses keeps."""
        parts = [part for part in self.model.parts if part.mark.use in repeat.uses]
        return sum(part.change for part in parts[: next(index for index, part in enumerate(parts) if part.mark.event is Event.BACKWARD)])

    # ---- the program

    def items(self, microbatches: int) -> Iterator[Item]:
        """What the rank does in a step of so many micro-batches, of which RECORDED_MICROBATCHES are known at most."""
        for segment in self._segments(microbatches):
            yield from segment.items

    def _segments(self, microbatches: int) -> Iterator[Segment]:
        recorded = min(self.microbatches, RECORDED_MICROBATCHES)
        left_out = range(microbatches - 1, recorded - 1)  # the last one is another than those before it
        chosen = (segment for segment in self.engine.segments if segment.microbatch is None or segment.microbatch not in left_out)
        for _, segments in groupby(chosen, key=lambda segment: (segment.microbatch, segment.verb)):
            alike = list(segments)
            for index, segment in enumerate(alike):
                yield segment
                for repeat in self.repeats:
                    ends = segment.name in repeat.units and (index + 1 == len(alike) or alike[index + 1].name not in repeat.units)
                    if ends:
                        again = [other for other in alike if other.name in repeat.units]
                        for _ in range(repeat.times):
                            yield from again

    def _counted(self, count: Callable[[Item], Traffic | int], zero: Traffic | int) -> Any:
        """The sum of `count` over everything in a step."""

        def of(microbatches: int) -> Any:
            return sum((count(item) for item in self.items(microbatches)), start=zero)

        recorded = min(self.microbatches, RECORDED_MICROBATCHES)
        known = of(recorded)
        return known if recorded == self.microbatches else known + (known - of(recorded - 1)) * (self.microbatches - recorded)

    def traffic(self, *categories: Category) -> Traffic:
        """What the rank receives in a step, of these categories."""
        found: Traffic = self._counted(
            lambda item: item.traffic if isinstance(item, Booked) and item.category in categories else Traffic(), Traffic()
        )
        return found

    @cached_property
    def collectives(self) -> int:
        """In which the rank takes part in a step, without those of a few numbers."""
        found: int = self._counted(lambda item: isinstance(item, (Submit, Cross)) and item.traffic != Traffic(), 0)
        return found


def plan_step(config: Config, grid: Grid, padded_vocab_size: int, *, kind: str) -> PlannedStep:
    """The step of a resolved configuration. kind: of the devices, cpu or cuda."""
    small, repeats = without_repeats(config.model, prefetch_of(config.zero))
    config = replace(config, model=small)
    training = config.training
    microbatches = training.global_batch_size // (training.micro_batch_size * grid.sample_groups)
    model, kept_inputs = _recorded(config, grid, padded_vocab_size, kind)
    options = engine_options(config, Observer())
    options = replace(options, full_precision_iterations=min(1, options.full_precision_iterations))
    run = EngineRun(model, options, grid, kind, _workspace(config, kind), [repeat.uses for repeat in repeats], kept_inputs)
    return PlannedStep(model, run.run(min(microbatches, RECORDED_MICROBATCHES)), repeats, microbatches)


def _workspace(config: Config, kind: str) -> Workspace:
    return Workspace(kind == "cuda", config.training.deterministic_mode)


def _recorded(config: Config, grid: Grid, padded_vocab_size: int, kind: str) -> tuple[ModelRecord, Counter[str]]:
    """One micro-batch of the model of a rank, and the bytes by kind that lasting places of kept inputs take."""
    recorder = Recorder(notes_streams=True)
    streams = RecordedStreams(recorder) if kind == "cuda" else None
    ledger = RecordedLedger(grid, 0)
    ledger.recorder = recorder
    ladder = Ladder(RecordedBackend(grid, recorder, has_streams=streams is not None), NoLanes(), ledger, META, streams)
    kept = LiveMemory(_workspace(config, kind), lambda nbytes: None)
    if streams is not None:
        streams.live = kept
    with standing_for(kind):
        model = build_model(config, padded_vocab_size, None, ladder)
        with kept, kept.of_kind(KEPT_INPUTS):
            inputs = build_kept_inputs(config, working_dtype(config.precision), ladder)
        if inputs is not None:
            model.keep_inputs(inputs)
        units = model.unit_specs(_no_values)
        batch = _batch(config, grid)
        record = record_model(model, units, model.uses(), recorder, lambda: microbatch_loss(model, batch(), META), _workspace(config, kind), streams)
    return record, kept.by_kind


def _batch(config: Config, grid: Grid) -> Callable[[], MicroBatch]:
    """Makes a micro-batch of one rank."""
    samples, length = config.training.micro_batch_size, config.model.seq_length
    shape = samples, length // grid.context_ranks
    is_divided = grid.context_ranks > 1

    def make() -> MicroBatch:
        tokens, labels = (torch.empty(shape, dtype=torch.int64, device=META) for _ in range(2))
        return MicroBatch(
            tokens,
            labels,
            torch.empty(shape, device=META),
            first_sample=0,
            position_ids=torch.empty(samples, length, dtype=torch.int64, device=META) if config.data.reset_position_ids else None,
            document_lengths=torch.tensor([1, length - 1, *[length] * (samples - 1)]) if config.data.reset_attention_mask else None,
            mean_counted=1.0 if is_divided else None,
        )

    return make


def _no_values(name: str, division: Division) -> InitialValues:
    return lambda start, stop: torch.empty(stop - start, device=META)
