"""Plans a step: a real step of one rank on a machine that computes nothing, with fewer layers (training/plan/repeats.py).

The model is run without an engine, and the engine under a model that plays what the first run recorded. Memory, bytes and the program of
the step come from these two runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby

import torch
from torch import Tensor

from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.config.schema import Config, DistributedConfig, ModelConfig, PrecisionConfig
from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.model.shapes import InitialValues
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.ops.device_kind import standing_for
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.kept_inputs import build_kept_inputs
from megatron_zpp.training.plan.clock import RECORDED_MICROBATCHES
from megatron_zpp.training.plan.kinds import ACTIVATIONS, KEPT_INPUTS
from megatron_zpp.training.plan.live_memory import LiveMemory, Workspace
from megatron_zpp.training.plan.model_record import Event, ModelRecord, record_model
from megatron_zpp.training.plan.outer_plan import outer_plan
from megatron_zpp.training.plan.program import Booked, Compute, Cross, Item, Segment, Submit
from megatron_zpp.training.plan.recorder import META, NoLanes, PlannedStaging, RecordedStreams, Recorder, recorded_links
from megatron_zpp.training.plan.repeats import Repeat, without_repeats
from megatron_zpp.training.plan.step_record import EngineRun, PlannedOuter, StepRecord
from megatron_zpp.training.setup import build_model, engine_options, working_dtype
from megatron_zpp.training.sharding import column_grid, prefetch_of, sample_groups_of
from megatron_zpp.training.step import microbatch_loss
from megatron_zpp.zero.engine_options import EngineOptions

KNOWN_STEPS = 32  # of different models and of different engines; each takes less than a megabyte
_SILENT = Observer()


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
    """A step of one rank, planned. microbatches: of the step. repeats: layers that stand for others.

    chunks: of layers that were recomputed together.
    """

    model: ModelRecord
    engine: StepRecord
    repeats: tuple[Repeat, ...]
    microbatches: int
    chunks: int

    @cached_property
    def memory(self) -> PlannedMemory:
        found = [self._peak(held) for held in self.engine.peaks]
        return max(found, key=lambda peak: peak.total)

    def _peak(self, held: tuple[bool, ...]) -> PlannedMemory:
        """The peak while the activations of these repeated layers are kept, or are not."""
        peak = self.engine.peaks[held]
        on_device, on_host = Counter(peak.by_kind), Counter(self.engine.on_host)
        for repeat, is_held in zip(self.repeats, held, strict=True):
            if repeat.is_recomputed:
                for lasting, counter in ((self.model.lasting, on_device), (self.model.lasting_on_host, on_host)):
                    counter[KEPT_INPUTS] += repeat.times * lasting[KEPT_INPUTS] // self.chunks
            for unit in repeat.units:
                for kind, nbytes in self.engine.states[unit].items():
                    on_device[kind] += repeat.times * nbytes
                for kind, nbytes in self.engine.host_states[unit].items():
                    on_host[kind] += repeat.times * nbytes
            if is_held:
                on_device[ACTIVATIONS] += repeat.times * self._kept_by(repeat)
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

    def _times(self, segment: Segment) -> int:
        """How many segments of a step this one stands for, itself included."""
        between = segment.microbatch == 1 and self.microbatches >= RECORDED_MICROBATCHES
        layers = 1 + sum(repeat.times for repeat in self.repeats if segment.name in repeat.units)
        return layers * (self.microbatches - RECORDED_MICROBATCHES + 1 if between else 1)

    def _items_and_times(self) -> Iterator[tuple[Item, int]]:
        """Each recorded item, and how often there is one like it in a step."""
        for segment in self.engine.segments:
            times = self._times(segment)
            for item in segment.items:
                yield item, times

    def traffic(self, *categories: Category) -> Traffic:
        """What the rank receives in a step, of these categories."""
        return sum((self._booked[category] for category in categories), start=Traffic())

    @cached_property
    def _booked(self) -> Mapping[Category, Traffic]:
        booked = dict.fromkeys(Category, Traffic())
        for item, times in self._items_and_times():
            if isinstance(item, Booked):
                booked[item.category] += item.traffic * times
        return booked

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of products in a step of this rank, those that are repeated included."""
        return sum(times * item.flops for item, times in self._items_and_times() if isinstance(item, Compute))

    @cached_property
    def collectives(self) -> int:
        """In which the rank takes part in a step, without those of a few numbers."""
        return sum(times for item, times in self._items_and_times() if isinstance(item, (Submit, Cross)) and item.traffic != Traffic())


def plan_step(config: Config, grid: Grid, padded_vocab_size: int, *, is_on_gpu: bool) -> PlannedStep:
    """The step of a resolved configuration. grid: of the world, or of one island."""
    small, repeats = without_repeats(config.model, prefetch_of(config.zero))
    outer = _outer_of(config, padded_vocab_size, grid, left_out=config.model.num_layers - small.num_layers)
    # Kernels of Apex run on values alone, and it need not be installed here. Those of torch keep and make the same.
    config = replace(config, model=small).with_values(compile=False, norm_backend="torch", optimizer_backend="torch")
    training, workspace = config.training, Workspace(is_on_gpu, config.training.deterministic_mode)
    microbatches = training.global_batch_size // (training.micro_batch_size * sample_groups_of(config, grid))
    job = _ModelJob.of(config, grid, padded_vocab_size, workspace)
    # Evaluation keeps less than training, unless its micro-batches are larger.
    evaluated = training.eval_micro_batch_size
    larger = replace(job, config=config.with_values(micro_batch_size=evaluated), micro_batch_size=evaluated, is_training=False)
    evaluation = larger if training.eval_iters > 0 and evaluated > training.micro_batch_size else None
    options = engine_options(config, _SILENT)
    options = replace(options, full_precision_iterations=min(1, options.full_precision_iterations))
    spans = tuple(repeat.uses for repeat in repeats)
    engine = _played(job, evaluation, options, grid, spans, min(microbatches, RECORDED_MICROBATCHES), outer)
    return PlannedStep(_recorded(job), engine, repeats, microbatches, len(recomputed_chunks(small)))


def _outer_of(config: Config, padded_vocab_size: int, grid: Grid, left_out: int) -> PlannedOuter | None:
    """The outer steps that are planned, in a model from which so many layers are left out; None without outer steps."""
    plan = outer_plan(config, padded_vocab_size, grid)
    if plan is None:
        return None
    units = len(plan.numels)
    # All, one after the other: then the two exchanges under way are once those of the largest units that follow each other.
    of_all = range(units - left_out)
    due = _where_layers_are_left_out(plan.most_late, units, left_out) if plan.options.overlap_steps else of_all
    return PlannedOuter(plan.options, column_grid(config), tuple(due))


def _where_layers_are_left_out(late: Sequence[int], units: int, left_out: int) -> Sequence[int]:
    """Units that follow each other, by number, where some of the layers are left out: at the same end of the model, or between."""
    if late[0] == 0 or not left_out:
        return late
    return [unit - left_out for unit in late] if late[-1] == units - 1 else range(1, 1 + len(late))


@dataclass(frozen=True)
class _ModelJob:
    """What decides about a micro-batch of a rank's model, and nothing else: plans of several engines share the record."""

    model: ModelConfig
    distributed: DistributedConfig
    precision: PrecisionConfig
    micro_batch_size: int
    resets: tuple[bool, bool]
    grid: Grid
    padded_vocab_size: int
    workspace: Workspace
    config: Config = field(compare=False)
    is_training: bool = True

    @classmethod
    def of(cls, config: Config, grid: Grid, padded_vocab_size: int, workspace: Workspace) -> _ModelJob:
        data, nodes = config.data, max(1, grid.context_ranks // grid.ladder.ranks_per_node)
        of_any_world = replace(grid, world_size=nodes * grid.ranks_per_node, partition_ranks=1)  # other samples are on other ranks
        return cls(
            config.model,
            config.distributed,
            config.precision,
            config.training.micro_batch_size,
            (data.reset_position_ids, data.reset_attention_mask),
            of_any_world,
            padded_vocab_size,
            workspace,
            config,
        )


@lru_cache(maxsize=KNOWN_STEPS)
def _played(
    job: _ModelJob,
    evaluation: _ModelJob | None,
    options: EngineOptions,
    grid: Grid,
    spans: tuple[range, ...],
    microbatches: int,
    outer: PlannedOuter | None,
) -> StepRecord:
    """The step of the engine under this model. A run is planned again and again: to be timed, checked, and beside others."""
    evaluated = None if evaluation is None else _recorded(evaluation)
    return EngineRun(_recorded(job), options, grid, job.workspace, spans, evaluated, outer).run(microbatches)


@lru_cache(maxsize=KNOWN_STEPS)
def _recorded(job: _ModelJob) -> ModelRecord:
    config, recorder = job.config, Recorder(notes_streams=True)
    streams = RecordedStreams(recorder) if job.workspace.is_on_gpu else None
    staging = PlannedStaging(streams, None)
    links = recorded_links(job.grid, recorder, NoLanes(), streams, staging)
    places = (staging,) if streams is None else (staging, streams)
    with standing_for(job.workspace.device_type):
        model = build_model(config, job.padded_vocab_size, None, links)

        def loss_of(live: LiveMemory) -> Tensor:
            with live.of_kind(KEPT_INPUTS):
                inputs = build_kept_inputs(config, working_dtype(config.precision), links)
            if inputs is not None:
                model.keep_inputs(inputs)
            return microbatch_loss(model, _batch(config, job.grid), META)

        return record_model(
            model, model.unit_specs(_no_values), model.uses(), recorder, loss_of, job.workspace, places, is_training=job.is_training
        )


def _batch(config: Config, grid: Grid) -> MicroBatch:
    """A micro-batch of one rank."""
    samples, length = config.training.micro_batch_size, config.model.seq_length
    shape = samples, length // grid.context_ranks
    tokens, labels = (torch.empty(shape, dtype=torch.int64, device=META) for _ in range(2))
    return MicroBatch(
        tokens,
        labels,
        torch.empty(shape, device=META),
        first_sample=0,
        position_ids=torch.empty(samples, length, dtype=torch.int64, device=META) if config.data.reset_position_ids else None,
        document_lengths=torch.tensor([1, length - 1, *[length] * (samples - 1)]) if config.data.reset_attention_mask else None,
        mean_counted=1.0 if grid.context_ranks > 1 else None,
    )


def _no_values(name: str, division: Division) -> InitialValues:
    return _empty


def _empty(start: int, stop: int) -> Tensor:
    return torch.empty(stop - start, device=META)
