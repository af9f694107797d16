"""Sizes and arithmetic of a model, from its configuration alone.

Two counts of floating-point operations are in use and differ; both are here under their names, neither is "the" FLOPs. Both count matrix
products only, one multiplication and one addition as two operations.

T tokens, S tokens per sample, V padded vocabulary, L layers, H hidden size, A heads x channels, F feed-forward hidden size.
"""

from __future__ import annotations

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_blocks, recomputes_attention


def parameter_count(config: ModelConfig, padded_vocab_size: int) -> int:
    """Parameters of the whole model; a tied output is counted once."""
    hidden, ffn, heads_width = config.hidden_size, config.ffn_hidden_size, config.num_attention_heads * config.kv_channels
    attention = 3 * heads_width * (hidden + 1) + hidden * (heads_width + 1)
    mlp = ffn * (hidden + 1) + hidden * (ffn + 1)
    norm = 2 * hidden
    words = padded_vocab_size * hidden * (2 if config.untie_embeddings_and_output_weights else 1)
    return words + config.max_position_embeddings * hidden + config.num_layers * (attention + mlp + 2 * norm) + norm


def model_flops(config: ModelConfig, padded_vocab_size: int, sample_count: int) -> int:
    """Operations that training on `sample_count` samples requires: Megatron-LM's convention, "model FLOPs".

    3 T [L (2 H 3A + 2 A H + 4 H F + 2 A S) + 2 H V]: backward is twice forward, causal attention is half of the square, a recomputation
    does not count. Source: num_floating_point_operations in Megatron-LM's training.py.
    """
    attention_scores = _attention_scores_flops_per_token(config) // 2
    forward_per_token = config.num_layers * (_linear_flops_per_token(config) + attention_scores) + _head_flops_per_token(
        config, padded_vocab_size
    )
    return 3 * forward_per_token * sample_count * config.seq_length


def hardware_flops(config: ModelConfig, padded_vocab_size: int, sample_count: int) -> int:
    """Operations of training on `sample_count` samples as Megatron-DeepSpeed counts them: "hardware FLOPs".

    T [(3 L + R) (2 H 3A + 2 A H + 4 H F + 4 A S) + 3 * 2 H V] with R recomputed blocks: attention is the full square, and what is
    recomputed counts again (of recomputed attention 4 A S; the output projection is not recomputed).
    Source: Narayanan et al., arXiv 2104.04473, equation 3, where A = H, F = 4 H and R = L.
    """
    scores = _attention_scores_flops_per_token(config)
    block = _linear_flops_per_token(config) + scores
    again = config.num_layers * scores if recomputes_attention(config) else recomputed_blocks(config) * block
    per_token = 3 * config.num_layers * block + again + 3 * _head_flops_per_token(config, padded_vocab_size)
    return per_token * sample_count * config.seq_length


def forward_flops_of_uses(config: ModelConfig, padded_vocab_size: int, sample_count: int) -> tuple[int, ...]:
    """Operations of the forward of each use (embedding, blocks, final) on `sample_count` samples; a third of `model_flops` together."""
    tokens = sample_count * config.seq_length
    block = tokens * (_linear_flops_per_token(config) + _attention_scores_flops_per_token(config) // 2)
    return (0, *[block] * config.num_layers, tokens * _head_flops_per_token(config, padded_vocab_size))


def recomputed_flops_of_uses(config: ModelConfig, padded_vocab_size: int, sample_count: int) -> tuple[int, ...]:
    """Operations that the backward of each use (embedding, blocks, final) repeats of its forward on `sample_count` samples."""
    forward = forward_flops_of_uses(config, padded_vocab_size, sample_count)[1:-1]
    if recomputes_attention(config):
        blocks = [sample_count * config.seq_length * _attention_scores_flops_per_token(config) // 2] * config.num_layers
    else:
        blocks = [operations if index < recomputed_blocks(config) else 0 for index, operations in enumerate(forward)]
    return (0, *blocks, 0)


def _linear_flops_per_token(config: ModelConfig) -> int:
    heads_width = config.num_attention_heads * config.kv_channels
    return 2 * config.hidden_size * (3 * heads_width + heads_width + 2 * config.ffn_hidden_size)


def _attention_scores_flops_per_token(config: ModelConfig) -> int:
    return 4 * config.num_attention_heads * config.kv_channels * config.seq_length


def _head_flops_per_token(config: ModelConfig, padded_vocab_size: int) -> int:
    return 2 * config.hidden_size * padded_vocab_size
