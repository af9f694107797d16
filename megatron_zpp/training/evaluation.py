"""The loss on held-out data."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.training.held_out import HeldOutSet
from megatron_zpp.training.step import token_losses
from megatron_zpp.zero.engine import ZeroEngine


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
