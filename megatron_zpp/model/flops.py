"""Counts the parameters and the floating-point operations of a model from its configuration alone.

Two counts of operations are in use, and they differ: `model_flops` and `hardware_flops`. Both count matrix products only; a multiplication
and an addition are two operations.

T tokens, S tokens per sample, V padded vocabulary, L layers, H hidden size, A = heads x channels of a head, C = key and value heads x
channels of a head, F feed-forward hidden size, m feed-forward matrices: 3 with a gate, else 2.
"""

from __future__ import annotations

import math

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_blocks, recomputes_attention
from megatron_zpp.model.loss_chunks import has_chunks
from megatron_zpp.model.shapes import ModelShape


def parameter_count(config: ModelConfig, padded_vocab_size: int) -> int:
    """Parameters of the whole model; a tied output is counted once."""
    units = ModelShape(config, padded_vocab_size).unit_specs()
    return sum(math.prod(param.whole_shape) for unit in units for param in unit.params)


def model_flops(config: ModelConfig, padded_vocab_size: int, sample_count: int) -> int:
    """Operations that training on `sample_count` samples requires: Megatron-LM's convention, "model FLOPs".

    3 T [L (2 H (A + 2 C) + 2 A H + 2 m H F + 2 A S) + 2 H V]: backward counts as twice forward, causal attention as half of the square,
    and recomputation not at all. Source: num_floating_point_operations in Megatron-LM's training.py.
    """
    attention_scores = _attention_scores_flops_per_token(config) // 2
    forward_per_token = config.num_layers * (_linear_flops_per_token(config) + attention_scores) + _head_flops_per_token(
        config, padded_vocab_size
    )
    return 3 * forward_per_token * sample_count * config.seq_length


def hardware_flops(config: ModelConfig, padded_vocab_size: int, sample_count: int, *, micro_batch_size: int, context_ranks: int = 1) -> int:
    """Operations of training on `sample_count` samples as Megatron-DeepSpeed counts them: "hardware FLOPs".

    T [(3 L + R) (2 H (A + 2 C) + 2 A H + 2 m H F + 4 A S) + 3 * 2 H V] with R recomputed blocks: attention counts as the full square, and
    recomputed operations count again, even the last product of a chunk, which does not run again. If only attention is recomputed, these
    are 4 A S per token and layer, without the output projection. If the loss of a micro-batch is computed in chunks, the logits are
    recomputed: 4 * 2 H V. context_ranks: that divide the tokens of a micro-batch.
    Source: Narayanan et al., arXiv 2104.04473, equation 3, where A = C = H, F = 4 H, m = 2 and R = L.
    """
    scores = _attention_scores_flops_per_token(config)
    block = _linear_flops_per_token(config) + scores
    again = config.num_layers * scores if recomputes_attention(config) else recomputed_blocks(config) * block
    heads = 4 if recomputes_logits(config, micro_batch_size, context_ranks) else 3
    per_token = 3 * config.num_layers * block + again + heads * _head_flops_per_token(config, padded_vocab_size)
    return per_token * sample_count * config.seq_length


def recomputes_logits(config: ModelConfig, micro_batch_size: int, context_ranks: int) -> bool:
    """Whether backward computes the logits of a micro-batch of so many samples again, of which a rank has a part of the tokens."""
    return has_chunks(micro_batch_size * config.seq_length // context_ranks, config.loss_chunk_tokens)


def _linear_flops_per_token(config: ModelConfig) -> int:
    ffn_matrices = 3 if config.swiglu else 2
    return 2 * config.hidden_size * (config.qkv_width + config.heads_width + ffn_matrices * config.ffn_hidden_size)


def _attention_scores_flops_per_token(config: ModelConfig) -> int:
    return 4 * config.heads_width * config.seq_length


def _head_flops_per_token(config: ModelConfig, padded_vocab_size: int) -> int:
    return 2 * config.hidden_size * padded_vocab_size
