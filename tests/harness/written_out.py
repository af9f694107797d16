"""The model written out in fp64, head by head and query by query: the independent reference of every architecture.

p: parameters by name, fp64. x: [S, H] of one sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig

Params = dict[str, Tensor]


def loss_by_hand(p: Params, config: ModelConfig, tokens_S: Tensor, labels_S: Tensor) -> Tensor:
    """loss_S in fp64."""
    x = torch.stack([p["embedding.word.weight"][token] for token in tokens_S])
    if config.position_embedding_type == "learned_absolute":
        x = x + p["embedding.position.weight"][: len(x)]
    for i in range(config.num_layers):
        b = {name.removeprefix(f"blocks.{i}."): value for name, value in p.items() if name.startswith(f"blocks.{i}.")}
        mixed = attention_by_hand(norm_by_hand(x, b, "attention_norm", config), b, config)
        x = x + linear_by_hand(mixed, b, "attention.projection")
        inner = linear_by_hand(norm_by_hand(x, b, "mlp_norm", config), b, "mlp.up")
        x = x + linear_by_hand(activation_by_hand(inner, config), b, "mlp.down")
    x = norm_by_hand(x, p, "final.norm", config)
    probabilities = torch.softmax(x @ p.get("final.head.weight", p["embedding.word.weight"]).T, dim=-1)
    return torch.stack([-probabilities[t, label].log() for t, label in enumerate(labels_S)])


def linear_by_hand(x: Tensor, p: Params, name: str) -> Tensor:
    product = x @ p[f"{name}.weight"].T
    return product + p[f"{name}.bias"] if f"{name}.bias" in p else product


def norm_by_hand(x: Tensor, p: Params, name: str, config: ModelConfig) -> Tensor:
    gain = p[f"{name}.weight"] + (1 if config.apply_layernorm_1p else 0)
    if config.normalization == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * gain
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * gain + p[f"{name}.bias"]


def activation_by_hand(x: Tensor, config: ModelConfig) -> Tensor:
    if config.swiglu:
        gate, value = x[:, : config.ffn_hidden_size], x[:, config.ffn_hidden_size :]
        return gate / (1 + (-gate).exp()) * value
    if config.squared_relu:
        return torch.where(x > 0, x * x, 0.0)
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention_by_hand(x: Tensor, p: Params, config: ModelConfig) -> Tensor:
    """[S, N D]: each query head with the key and value of its group."""
    channels, shared = config.kv_channels, config.num_attention_heads // config.key_value_heads
    rows = linear_by_hand(x, p, "attention.qkv").split(channels, dim=1)
    outputs = []
    for group in range(config.key_value_heads):
        *queries, key, value = rows[group * (shared + 2) : (group + 1) * (shared + 2)]
        key = turned_by_hand(head_norm_by_hand(key, p, "attention.key_norm", config), config)
        for query in queries:
            query = turned_by_hand(head_norm_by_hand(query, p, "attention.query_norm", config), config)
            mixed = [torch.softmax(key[: t + 1] @ query[t] / math.sqrt(channels), dim=0) @ value[: t + 1] for t in range(len(x))]
            outputs.append(torch.stack(mixed))
    return torch.cat(outputs, dim=1)


def head_norm_by_hand(x: Tensor, p: Params, name: str, config: ModelConfig) -> Tensor:
    return norm_by_hand(x, p, name, config) if config.qk_layernorm else x


def turned_by_hand(head: Tensor, config: ModelConfig) -> Tensor:
    """[S, D]: pairs of channels are complex numbers that are multiplied by e^(i angle)."""
    if config.position_embedding_type != "rope":
        return head
    count = math.floor(config.kv_channels * config.rotary_percent)
    pairs = [(2 * i, 2 * i + 1) if config.rotary_interleaved else (i, i + count // 2) for i in range(count // 2)]
    columns = list(head.unbind(1))
    for i, (first, second) in enumerate(pairs):
        frequency = stretched_by_hand(config.rotary_base ** (-2 * i / count), config)
        angles = torch.arange(len(head)).double() / config.rotary_seq_len_interpolation_factor * frequency
        turned = torch.complex(columns[first], columns[second]) * torch.polar(torch.ones(len(head)).double(), angles)
        columns[first], columns[second] = turned.real, turned.imag
    return torch.stack(columns, dim=1)


def stretched_by_hand(frequency: float, config: ModelConfig) -> float:
    """As the Llama 3.1 report's code has it, by wavelength."""
    if not config.use_rope_scaling:
        return frequency
    context, low, high = (
        config.rope_scaling_original_max_position_embeddings,
        config.rope_scaling_low_freq_factor,
        config.rope_scaling_high_freq_factor,
    )
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / config.rope_scaling_factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / config.rope_scaling_factor + smooth * frequency
