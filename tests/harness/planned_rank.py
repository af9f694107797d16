"""Plans of the memory of modules: the record of a module, and a run of the engine under it on tensors without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from harness.live_rank import Held
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.device_kind import standing_for
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.training.plan.kinds import COPY, OTHER, PAYLOADS, STATES
from megatron_zpp.training.plan.live_memory import LiveMemory, Workspace
from megatron_zpp.training.plan.model_record import ModelRecord, record_model
from megatron_zpp.training.plan.recorder import (
    META,
    NoLanes,
    PlannedStaging,
    RecordedStreams,
    Recorder,
    recorded_links,
)
from megatron_zpp.training.plan.step_record import EngineRun, Peak, StepRecord
from megatron_zpp.zero.engine_options import EngineOptions

ON_CPU = Workspace(is_on_gpu=False)


def recorded(module: nn.Module, units: Sequence[UnitSpec], uses: Sequence[Use], loss_of: Callable[[], Tensor]) -> ModelRecord:
    """One micro-batch of a module on the meta device, on a CPU. loss_of: calls the module."""
    return record_model(module, units, uses, Recorder(notes_streams=False), lambda live: loss_of(), ON_CPU)


def run_of(record: ModelRecord, options: EngineOptions, grid: Grid, microbatches: int = 1) -> StepRecord:
    return EngineRun(record, options, grid, ON_CPU, []).run(microbatches)


def peak_of(step: StepRecord) -> Peak:
    (peak,) = step.peaks.values()
    return peak


def check_peak(planned: Mapping[str, int], held: Sequence[Held]) -> None:
    """Raises AssertionError unless the planned bytes, by kind, hold what ranks had at once, and are at most 7 % more.

    The most is without buffers of payloads and what codecs make beside them: those depend on links, which a plan takes for slow.
    """
    total, buffers = sum(planned.values()), planned.get(PAYLOADS, 0) + planned.get(COPY, 0)
    assert total >= 0.99 * max(rank.peak for rank in held)
    assert buffers >= max(rank.staging for rank in held)
    assert total - buffers - planned.get(OTHER, 0) <= 1.07 * max(rank.peak_beside_buffers for rank in held)


def states_of(step: StepRecord) -> Mapping[str, int]:
    """Bytes of states by kind, at the end of the last backward."""
    total = sum(step.states.values(), start=Counter[str]())
    return {kind: nbytes for kind, nbytes in total.items() if kind in STATES}


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
    staging = PlannedStaging(streams, None)
    links = recorded_links(grid, recorder, NoLanes(), streams, staging)
    with standing_for(workspace.device_type):
        tensor = None if links.tensor_link is None else TensorParallel(links.tensor_link, sequence_parallel)
        model = GPT(config, vocabulary, 7, dtype, tensor, links.context_link)

        def loss_of(live: LiveMemory) -> Tensor:
            with live.of_kind(None):
                tokens = torch.empty(samples, config.seq_length // grid.context_ranks, dtype=torch.int64, device=META)
            loss: Tensor = model(tokens, tokens, first_sample=0).sum()
            return loss

        places = (staging,) if streams is None else (staging, streams)
        return record_model(model, model.unit_specs(), model.uses(), recorder, loss_of, workspace, places)


def peak_of_model(record: ModelRecord) -> int:
    """The most bytes of the model's own tensors at once, with the gradients of weights while they are made."""
    now = most = sum(record.lasting.values())
    for part in record.parts:
        most = max(most, now + part.peak)
        now += part.change
    return most
