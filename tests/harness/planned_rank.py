"""Plans of small modules: the record of a module, and a run of the engine under it on tensors without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from harness.small_engine import GLOBAL_BATCH, TOKENS, Job, SmallModel
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.comm.links import Ladder
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.device_kind import standing_for
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.training.plan.kinds import STATES
from megatron_zpp.training.plan.live_memory import LiveMemory, Workspace
from megatron_zpp.training.plan.model_record import ModelRecord, record_model
from megatron_zpp.training.plan.program import Booked
from megatron_zpp.training.plan.recorder import (
    META,
    NoLanes,
    PlannedStaging,
    RecordedBackend,
    RecordedLedger,
    RecordedStreams,
    Recorder,
)
from megatron_zpp.training.plan.step_record import EngineRun, Peak, StepRecord
from megatron_zpp.zero.engine_options import EngineOptions

ON_CPU, ON_GPU = (Workspace(is_on_gpu) for is_on_gpu in (False, True))


def recorded(
    module: nn.Module, units: Sequence[UnitSpec], uses: Sequence[Use], loss_of: Callable[[], Tensor], workspace: Workspace = ON_CPU
) -> ModelRecord:
    """One micro-batch of a module on the meta device. loss_of: calls the module."""
    return record_model(module, units, uses, Recorder(notes_streams=False), lambda live: loss_of(), workspace)


def planned_step(job: Job, grid: Grid, workspace: Workspace = ON_CPU) -> StepRecord:
    """A step of the small model (harness/small_engine.py) on a rank."""
    model = SmallModel(job.shape, job.dtype)
    samples = max(1, GLOBAL_BATCH // (grid.data_ranks * job.microbatches))

    def loss() -> Tensor:
        tokens, labels = (torch.empty(samples, TOKENS, dtype=torch.int64, device=META) for _ in range(2))
        found: Tensor = model(tokens, labels)
        return found

    record = recorded(model, model.unit_specs(), model.uses(), loss, workspace)
    return run_of(record, options_of(job), grid, job.microbatches, workspace)


def options_of(job: Job) -> EngineOptions:
    """The options that ranks of this job have."""
    return EngineOptions(
        job.policy, job.dtype, job.block_numel, job.prefetch, job.adam, job.clip_grad, job.full_precision_iterations, job.counts_zeros
    )


def run_of(record: ModelRecord, options: EngineOptions, grid: Grid, microbatches: int = 1, workspace: Workspace = ON_CPU) -> StepRecord:
    return EngineRun(record, options, grid, workspace, []).run(microbatches)


def peak_of(step: StepRecord) -> Peak:
    (peak,) = step.peaks.values()
    return peak


def states_of(step: StepRecord) -> Mapping[str, int]:
    """Bytes of states by kind, at the end of the last backward."""
    total = sum(step.states.values(), start=Counter[str]())
    return {kind: nbytes for kind, nbytes in total.items() if kind in STATES}


def traffic_of(step: StepRecord, *categories: Category) -> Traffic:
    """What the rank receives in a step."""
    booked = [item for segment in step.segments for item in segment.items if isinstance(item, Booked)]
    return sum((item.traffic for item in booked if item.category in categories), start=Traffic())


def planned_activations(
    config: ModelConfig,
    vocabulary: int,
    samples: int,
    dtype: torch.dtype,
    grid: Grid,
    *,
    sequence_parallel: bool = False,
    is_on_gpu: bool = False,
) -> ModelRecord:
    """One micro-batch of a GPT on one rank, whose loss is the sum of the losses of all tokens."""
    workspace, recorder = Workspace(is_on_gpu), Recorder(notes_streams=True)
    streams = RecordedStreams(recorder) if is_on_gpu else None
    staging, ledger = PlannedStaging(streams, None), RecordedLedger(grid, 0)
    ledger.recorder = recorder
    ladder = Ladder(RecordedBackend(grid, recorder, has_streams=is_on_gpu), NoLanes(), ledger, META, streams, staging=staging)
    with standing_for(workspace.device_type):
        tensor = None if ladder.tensor_link is None else TensorParallel(ladder.tensor_link, sequence_parallel)
        model = GPT(config, vocabulary, 7, dtype, tensor, ladder.context_link)

        def loss_of(live: LiveMemory) -> Tensor:
            with live.of_kind(None):
                tokens = torch.empty(samples, config.seq_length // grid.context_ranks, dtype=torch.int64, device=META)
            loss: Tensor = model(tokens, tokens, first_sample=0).sum()
            return loss

        places = (staging,) if streams is None else (staging, streams)
        return record_model(model, model.unit_specs(), model.uses(), recorder, loss_of, workspace, places)


def most_bytes(record: ModelRecord) -> int:
    """The most bytes of the model's own tensors at once, with the gradients of weights while they are made."""
    now = most = sum(record.lasting.values())
    for part in record.parts:
        most = max(most, now + part.peak)
        now += part.change
    return most
