"""Small models for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.initialization import materialize

VOCAB = 61


def small_config(**changes: Any) -> ModelConfig:
    """Two layers of odd sizes without dropout: heads are wider than hidden / heads, positions more than tokens, F is not 4 H."""
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "ffn_hidden_size": 40,
        "kv_channels": 10,
        "seq_length": 12,
        "max_position_embeddings": 16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return ModelConfig(**(fields | changes))


def small_gpt(seed: int = 7, dtype: torch.dtype = torch.float32, **changes: Any) -> GPT:
    """A real model on the CPU, biases and gains away from 0 and 1 so that leaving one out is seen."""
    model = materialize(GPT(small_config(**changes), VOCAB, seed, dtype))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
            else:
                parameter.mul_(5.0)
    return model


def sample_batch(samples: int = 3, length: int = 12) -> tuple[Tensor, Tensor]:
    """(tokens_BS, labels_BS), labels one token ahead."""
    text = torch.randint(VOCAB, (samples, length + 1), generator=torch.Generator().manual_seed(2))
    return text[:, :-1], text[:, 1:]


def loss_and_gradients(model: GPT, first_sample: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss_BS, gradient of its weighted sum by parameter name), leaving no gradient behind."""
    loss_BS = model(*sample_batch(), first_sample=first_sample)
    weights = torch.linspace(0.5, 1.5, loss_BS.numel()).view(loss_BS.shape)
    (loss_BS * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss_BS.detach(), gradients
