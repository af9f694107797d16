"""A GPT with all weights on one rank, and the same GPT whose layers ranks share."""

from __future__ import annotations

from typing import Any

import torch

from harness.tensor_parts import VOCAB, config_of, part_of
from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.tensor_parallel.context import TensorParallel


def whole_gpt(model: str, **changes: Any) -> GPT:
    """Biases and gains away from 0 and 1, and weights large enough for every gradient to matter."""
    gpt = materialize(GPT(config_of(model, **changes), VOCAB, 7, torch.float32))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return gpt


def divided_gpt(model: str, whole: GPT, tensor: TensorParallel | None, context: ContextLink | None = None, **changes: Any) -> GPT:
    """The same model, divided. context: to the ranks that share its samples."""
    config = config_of(model, **changes)
    ranks, rank = (1, 0) if tensor is None else (tensor.link.ranks, tensor.link.rank)
    weights = dict(whole.named_parameters())
    gpt = materialize(GPT(config, VOCAB, 7, weights["final.norm.weight"].dtype, tensor, context))
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(part_of(name, weights[name], config, ranks, rank))
    return gpt
