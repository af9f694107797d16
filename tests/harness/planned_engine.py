"""Plans of the small model of small_engine.py: the step of its engine on tensors without values."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.small_engine import GLOBAL_BATCH, TOKENS, Job, SmallModel, held_specs
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.plan.clock import RECORDED_MICROBATCHES
from megatron_zpp.training.plan.live_memory import LiveMemory, Workspace
from megatron_zpp.training.plan.model_record import record_model
from megatron_zpp.training.plan.planned_step import PlannedStep
from megatron_zpp.training.plan.recorder import META, Recorder
from megatron_zpp.training.plan.step_record import EngineRun


def planned_step(job: Job, grid: Grid, *, is_on_gpu: bool = False, recorded: int = RECORDED_MICROBATCHES) -> PlannedStep:
    """The step of rank 0. recorded: how many micro-batches the engine runs at most."""
    workspace, model = Workspace(is_on_gpu, False), SmallModel(job.shape, job.dtype)

    def loss_of(live: LiveMemory) -> Tensor:
        samples = max(1, GLOBAL_BATCH // (grid.data_ranks * job.microbatches))
        tokens, labels = (torch.empty((samples, TOKENS), dtype=torch.int64, device=META) for _ in range(2))
        loss: Tensor = model(tokens, labels)
        return loss

    record = record_model(model, held_specs(model.unit_specs(), grid, 0), model.uses(), Recorder(notes_streams=True), loss_of, workspace)
    run = EngineRun(record, job.options(), grid, workspace, [])
    return PlannedStep(record, run.run(min(job.microbatches, recorded)), (), job.microbatches, chunks=1)
