"""An estimate of the memory that activations take, from the configuration alone.

T tokens of a micro-batch, S tokens per sample, H hidden size, A heads x channels, C key and value heads x channels, F feed-forward hidden
size, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_blocks, recomputed_chunks, recomputes_attention

MASK_BYTES = 1  # of an element that dropout may drop
STATISTICS_BYTES = 2 * 4  # mean and deviation of a token in a norm, fp32
SCORE_BYTES = 3 * 4  # fp32 scores after softmax, after dropout, and the mask, as torch's plain attention keeps them
NORMALIZER_BYTES = 4  # of a token and head, where the kernel computes scores again
CHUNK_BYTES = 2 * 64 * 2**20  # fp32 values of the loss that exist at once, see model/cross_entropy.py


@dataclass(frozen=True)
class AttentionNeed:
    """What a kernel of attention keeps. keeps_scores: its S x S matrices. repeats_heads: shared key and value heads, once per query."""

    keeps_scores: bool
    repeats_heads: bool = False


def activation_bytes(
    config: ModelConfig, padded_vocab_size: int, micro_batch_size: int, element_bytes: int, *, attention: AttentionNeed
) -> int:
    """An estimate of the most that activations and their gradients take in a micro-batch.

    What forward keeps: of a chunk of recomputed blocks its input, of every other block all, or all but what recomputed attention makes
    again. Beside it the larger of what the head needs, and of a block's gradients with what is computed again for it: the largest chunk,
    or one block's attention.
    """
    tokens = micro_batch_size * config.seq_length
    inside = tokens * _inside_attention_bytes_per_token(config, element_bytes, attention)
    block = tokens * _block_bytes_per_token(config, element_bytes) + inside
    hidden = tokens * config.hidden_size * element_bytes
    chunks = recomputed_chunks(config)
    kept_of_block, again = (block - inside, inside) if recomputes_attention(config) else (block, 0)
    kept = len(chunks) * hidden + (config.num_layers - recomputed_blocks(config)) * kept_of_block
    again = max((len(chunk) * block for chunk in chunks), default=again)
    head = 2 * tokens * padded_vocab_size * element_bytes + min(CHUNK_BYTES, 2 * 4 * tokens * padded_vocab_size) + 2 * hidden
    word_gradient = 0 if config.untie_embeddings_and_output_weights else padded_vocab_size * config.hidden_size * element_bytes
    backward_of_block = block + again + word_gradient
    return kept + hidden + max(head, backward_of_block)


def mask_bytes(samples: int, length: int, element_bytes: int) -> int:
    """What a micro-batch's mask takes where documents are separated by one."""
    return samples * length * length * element_bytes


def _block_bytes_per_token(config: ModelConfig, element_bytes: int) -> int:
    """Inputs and outputs of two norms (4 H), what attention's projections read and write, both sides of the activation (3 F gated)."""
    ffn_widths = 3 if config.swiglu else 2
    values = 4 * config.hidden_size + config.qkv_width + config.heads_width + ffn_widths * config.ffn_hidden_size
    masks = 2 * config.hidden_size * MASK_BYTES if config.hidden_dropout > 0 else 0
    return element_bytes * values + masks + 2 * STATISTICS_BYTES


def _inside_attention_bytes_per_token(config: ModelConfig, element_bytes: int, attention: AttentionNeed) -> int:
    """What attention keeps between its projections, beside what they read and write.

    The mixture in the kernel's own layout (A), q, k and v once more where a step comes between, repeated heads, and scores.
    """
    repeated = 2 * (config.heads_width - config.key_value_heads * config.kv_channels) if attention.repeats_heads else 0
    is_rotated = config.position_embedding_type == "rope"
    is_copied = config.qk_layernorm or (config.key_value_heads < config.num_attention_heads and not is_rotated)
    values = config.heads_width + repeated + (config.qkv_width if is_copied else 0)
    scores = SCORE_BYTES * config.seq_length if attention.keeps_scores else NORMALIZER_BYTES
    return element_bytes * values + config.num_attention_heads * scores
