"""One training step as straight-line calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor, nn

from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.training.stop_conditions import StopRequest
from megatron_zpp.zero.engine import ZeroEngine


@dataclass(frozen=True)
class StepOutcome:
    """What one step came to.

    lm_loss: mean over the micro-batches of all ranks. model_state_bytes: at the end of backward. requests: of all ranks.
    num_zeros: elements of the mean gradient that are 0, where the engine counts them.
    """

    lm_loss: float
    grad_norm: float
    is_skipped: bool
    model_state_bytes: int
    requests: StopRequest = StopRequest.NONE
    num_zeros: int | None = None


@dataclass(frozen=True)
class StepPlan:
    """microbatches: of every rank. request: asks this rank at the end of the step whether the run is to end.

    before_update: returns when weights and moments may change; a checkpoint may still be copying them while gradients are made.
    """

    microbatches: int
    learning_rate: float
    weight_decay: float
    request: Callable[[], StopRequest] = lambda: StopRequest.NONE
    before_update: Callable[[], None] = lambda: None


def train_step(model: nn.Module, engine: ZeroEngine, batches: Iterator[MicroBatch], plan: StepPlan) -> StepOutcome:
    """Forward and backward of the plan's micro-batches, then one optimizer step; every rank must call it."""
    model.train()
    observer = engine.observer
    losses = []
    with observer.phase("forward-backward"):
        for index in range(plan.microbatches):
            with observer.phase("batch-generator"):
                batch = next(batches)
            with observer.phase("forward-compute"):
                loss = microbatch_loss(model, batch, engine.device)
            with observer.phase("backward-compute"):
                engine.backward(loss, microbatches=plan.microbatches, is_last_microbatch=index == plan.microbatches - 1)
            losses.append(loss.detach())
        with observer.phase("all-grads-sync"):
            engine.finish_gradients()
    model_state_bytes = engine.model_state_bytes()
    plan.before_update()
    with observer.phase("optimizer"):
        result = engine.update(plan.learning_rate, plan.weight_decay)
    lm_loss, requests = exchanged(losses, plan.request(), engine)
    return StepOutcome(lm_loss, result.grad_norm, result.is_skipped, model_state_bytes, requests, result.num_zeros)


def microbatch_loss(model: nn.Module, batch: MicroBatch, device: torch.device) -> Tensor:
    """The mean loss over the tokens of a micro-batch that count, a fp32 scalar; 0 where none does.

    As in Megatron, every micro-batch weighs the same in the means over micro-batches and ranks, however many of its tokens count.
    """
    loss_BS, loss_mask_BS = token_losses(model, batch, device)
    return (loss_BS * loss_mask_BS).sum() / loss_mask_BS.sum().clamp(min=1.0)


def token_losses(model: nn.Module, batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """The loss at every token of a micro-batch, and 1 where it counts, 0 where it does not; both [B, S] fp32."""
    loss_BS = model(
        batch.tokens.to(device),
        batch.labels.to(device),
        first_sample=batch.first_sample,
        position_ids_BS=None if batch.position_ids is None else batch.position_ids.to(device),
        document_lengths_R=batch.document_lengths,
    )
    return loss_BS, batch.loss_mask.to(device)


def exchanged(losses: list[Tensor], request: StopRequest, engine: ZeroEngine) -> tuple[float, StopRequest]:
    """The mean over this rank's losses and over all ranks, added in rank order, and the requests of all; every rank must call it."""
    total = torch.stack(losses).double().sum()
    gathered = engine.ladder.gather_world(torch.stack([total, total.new_full((), float(request))]))  # [world_size, 2] fp64
    sums, requests = gathered.T.tolist()
    return sum(sums) / (len(losses) * len(sums)), _united(requests)


def exchanged_requests(request: StopRequest, engine: ZeroEngine) -> StopRequest:
    """The requests of all ranks; every rank must call it."""
    own = torch.full((1,), float(request), dtype=torch.float64, device=engine.device)
    return _united(engine.ladder.gather_world(own).flatten().tolist())


def _united(requests: list[float]) -> StopRequest:
    return reduce(or_, (StopRequest(int(request)) for request in requests))
