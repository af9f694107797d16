"""The loss on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_zpp.config.schema import TrainingConfig
from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.training.step import token_losses
from megatron_zpp.zero.engine import ZeroEngine


@dataclass(frozen=True)
class HeldOutSet:
    """What one evaluation takes: the next `microbatches` micro-batches of this rank, without end. name: "" where there is one set."""

    name: str
    batches: Iterator[MicroBatch]
    microbatches: int


@torch.no_grad()
def evaluate(model: nn.Module, engine: ZeroEngine, held_out: HeldOutSet) -> float:
    """The mean loss over the tokens that count in one evaluation of all ranks, without dropout; every rank must call it.

    Every token weighs the same, also where micro-batches are not full; NaN where none counts. Uses the same decoded weights as training and
    changes nothing that training would notice.
    """
    model.eval()
    sums = [_loss_and_tokens(model, next(held_out.batches), engine.device) for _ in range(held_out.microbatches)]
    rows = engine.ladder.gather_world(torch.stack(sums).sum(dim=0)).tolist()  # [world_size, 2] fp64
    loss, tokens = (sum(column) for column in zip(*rows, strict=True))
    return loss / tokens if tokens > 0 else math.nan


def _loss_and_tokens(model: nn.Module, batch: MicroBatch, device: torch.device) -> Tensor:
    """The sum of the losses that count, and their number: [2] fp64."""
    loss_BS, loss_mask_BS = token_losses(model, batch, device)
    return torch.stack([(loss_BS * loss_mask_BS).double().sum(), loss_mask_BS.double().sum()])


def evaluations_before(iteration: int, training: TrainingConfig) -> int:
    """How many validations the iterations up to and with this one have been followed by, in a run that goes on after it."""
    return max(0, iteration // training.eval_interval - max(0, training.start_eval_at_iter - 1) // training.eval_interval)


def is_followed_by_validation(iteration: int, training: TrainingConfig) -> bool:
    """Whether this iteration, which is not the last one, ends with a validation."""
    return iteration % training.eval_interval == 0 and iteration >= training.start_eval_at_iter
