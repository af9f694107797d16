"""Plans of the small model of small_engine.py: the step of its engine on tensors without values; and rows of the policy table."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.codes import lean
from harness.small_engine import GLOBAL_BATCH, SECONDARY_ROW, TOKENS, Job, SmallModel, held_specs
from megatron_zpp.comm.code import Code
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.plan.clock import RECORDED_MICROBATCHES
from megatron_zpp.training.plan.live_memory import LiveMemory, Workspace
from megatron_zpp.training.plan.model_record import record_model
from megatron_zpp.training.plan.planned_step import PlannedStep
from megatron_zpp.training.plan.recorder import META, Recorder
from megatron_zpp.training.plan.step_record import EngineRun
from megatron_zpp.zero.policy import (
    POLICIES,
    Policy,
    Rung,
    with_gradients_summed_on_secondary,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
    with_weight_differences,
)

ALL = with_quantized_gradients(with_secondary_weights(with_quantized_weights(POLICIES[3])))
KEPT = {  # rows that keep a copy of the weights across steps
    "lean stage 1": lean(1),
    "lean stage 2": lean(2, bits=1),
    "lean stage 2, summed": with_gradients_summed_on_secondary(lean(2)),
    "lean stage 3": lean(3),
    "lean stage 3, summed": with_gradients_summed_on_secondary(lean(3, bits=2)),
    "differences in integers": with_weight_differences(with_secondary_weights(POLICIES[3]), Code(4)),
}
UNOFFERED = {  # no flag asks for these
    "secondary row": SECONDARY_ROW,
    "gradients in integers on the secondary rung": with_quantized_gradients(Policy(Rung.PRIMARY, Rung.SECONDARY, Rung.SECONDARY)),
    "full gradients beside a secondary rung": Policy(Rung.PRIMARY, Rung.FULL, Rung.SECONDARY),
}


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
