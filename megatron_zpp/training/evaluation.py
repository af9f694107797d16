"""The loss on held-out data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.training.step import mean_loss, microbatch_loss
from megatron_zpp.zero.engine import ZeroEngine


@torch.no_grad()
def evaluate(model: nn.Module, engine: ZeroEngine, batches: Iterator[MicroBatch], microbatches: int) -> float:
    """The mean loss over the next `microbatches` micro-batches of every rank, without dropout; every rank must call it.

    Uses the same decoded weights as training and changes nothing that training would notice.
    """
    model.eval()
    losses = [microbatch_loss(model, next(batches), engine.device) for _ in range(microbatches)]
    return mean_loss(losses, engine)
