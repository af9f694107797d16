"""Parts of one training step: forward and backward, losses, the numbers that ranks exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_zpp.comm.pinned_memory import copied_to
from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.zero.engine import ZeroEngine


@dataclass(frozen=True)
class StepOutcome:
    """Result of one training step.

    lm_loss: mean over the micro-batches of all ranks, or of those of an island. model_state_bytes, host_state_bytes: at the end of
    backward, on device and host. num_zeros: elements of the mean gradient that are 0, if the engine counts them.
    """

    lm_loss: float
    grad_norm: float
    is_skipped: bool
    model_state_bytes: int
    num_zeros: int | None = None
    host_state_bytes: int = 0


def forward_backward(model: nn.Module, engine: ZeroEngine, batches: Iterator[MicroBatch], microbatches: int) -> Tensor:
    """Makes the gradients of one step from the next `microbatches` of `batches`. Every rank must call it.

    Returns the sum of this rank's losses, [] fp64.
    """
    if not model.training:
        model.train()  # walks through every module
    observer = engine.options.observer
    losses = []
    with observer.phase("forward-backward"):
        for index in range(microbatches):
            with observer.phase("batch-generator"):
                batch = next(batches)
            with observer.phase("forward-compute"):
                loss = microbatch_loss(model, batch, engine.device)
            with observer.phase("backward-compute"):
                engine.backward(loss, microbatches=microbatches, is_last_microbatch=index == microbatches - 1)
            losses.append(loss.detach())
        with observer.phase("all-grads-sync"):
            engine.finish_gradients()
    return torch.stack(losses).double().sum()


def microbatch_loss(model: nn.Module, batch: MicroBatch, device: torch.device) -> Tensor:
    """Mean loss over the tokens of a micro-batch that count, [] fp32; 0 if none counts.

    As in Megatron, every micro-batch has the same weight in means over micro-batches and ranks, however many of its tokens count. If ranks
    divide samples, this is the mean of what they return: each returns the losses of its own tokens, as `mean_counted` weighs them.
    """
    loss_BQ, loss_mask_BQ = token_losses(model, batch, device)
    return (loss_BQ * loss_mask_BQ).sum() / (batch.mean_counted or loss_mask_BQ.sum().clamp(min=1.0))


def token_losses(model: nn.Module, batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Loss at every token of a micro-batch, and its mask: 1 if the token counts, else 0. Both are [B, Q] fp32."""
    batch = on_device(batch, device)
    loss_BQ = model(
        batch.tokens,
        batch.labels,
        first_sample=batch.first_sample,
        position_ids_BS=batch.position_ids,
        document_lengths_R=batch.document_lengths,
    )
    return loss_BQ, batch.loss_mask


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The micro-batch with its tensors on `device`, except the lengths of documents, which stay on the host."""
    return replace(
        batch,
        tokens=copied_to(device, batch.tokens),
        labels=copied_to(device, batch.labels),
        loss_mask=copied_to(device, batch.loss_mask),
        position_ids=None if batch.position_ids is None else copied_to(device, batch.position_ids),
    )


def row_of(numbers: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Scalars as a row that ranks can exchange, [len(numbers)] fp64 on `device`."""
    row = torch.empty(len(numbers), dtype=torch.float64, device=device)
    for column, value in enumerate(numbers):
        row[column].fill_(value)  # `row[column] = value` would copy a number from the host, which waits for the device until backward ends
    return row
