"""Small models for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT, materialize

VOCAB = 61
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
# Every flag of the architecture, alone or beside others that could get in its way.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "GPT-2 untied": {"untie_embeddings_and_output_weights": True},
    "Llama": LLAMA,
    "Llama 3, one key per head": LLAMA
    | {"num_query_groups": 4, "use_rope_scaling": True, "rope_scaling_original_max_position_embeddings": 16},
    "Qwen2": LLAMA | {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
    "Qwen3": LLAMA | {"qk_layernorm": True},
    "one key head, neighbours rotate": {
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "rotary_percent": 0.45,  # 4 of 10 channels
        "rotary_base": 100.0,
        "num_query_groups": 1,
    },
    "squared ReLU, gains minus 1": {
        "squared_relu": True,
        "apply_layernorm_1p": True,
        "position_embedding_type": "rope",
        "rotary_percent": 0.6,
        "rotary_seq_len_interpolation_factor": 4.0,
        "disable_bias_linear": True,
    },
    "no positions, shared heads normalized with bias": {
        "position_embedding_type": "none",
        "num_attention_heads": 6,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "swiglu": True,
    },
    "learned positions beside RMSNorm with gains minus 1": {
        "normalization": "RMSNorm",
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "num_query_groups": 1,
    },
}


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
        "make_vocab_size_divisible_by": 1,
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
