"""An estimate of the memory that activations take, from the configuration alone.

T tokens of a micro-batch, S tokens per sample, H hidden size, A heads x channels, F feed-forward hidden size, V padded vocabulary.
"""

from __future__ import annotations

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_blocks, recomputed_chunks, recomputes_attention

MASK_BYTES = 1  # of an element that dropout may drop
STATISTICS_BYTES = 2 * 4  # mean and deviation of a token in a norm, fp32
SCORE_BYTES = 3 * 4  # fp32 scores after softmax, after dropout, and the mask, as torch's plain attention keeps them
NORMALIZER_BYTES = 4  # of a token and head, where the kernel computes scores again
CHUNK_BYTES = 2 * 64 * 2**20  # fp32 values of the loss that exist at once, see tensor_parallel/cross_entropy.py


def activation_bytes(
    config: ModelConfig, padded_vocab_size: int, micro_batch_size: int, element_bytes: int, *, keeps_attention_scores: bool
) -> int:
    """An estimate of the most that activations and their gradients take in a micro-batch.

    What forward keeps: of a chunk of recomputed blocks its input, of every other block all, or all but what recomputed attention makes
    again. Beside it the larger of what the head needs, and of a block's gradients with what is computed again for it: the largest chunk,
    or one block's attention. keeps_attention_scores: whether the attention kernel keeps its S x S matrices.
    """
    tokens = micro_batch_size * config.seq_length
    attention = tokens * _attention_bytes_per_token(config, element_bytes, keeps_attention_scores)
    block = tokens * _block_bytes_per_token(config, element_bytes) + attention
    hidden = tokens * config.hidden_size * element_bytes
    chunks = recomputed_chunks(config)
    kept_of_block, again = (block - attention, attention) if recomputes_attention(config) else (block, 0)
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
    """Inputs and outputs of two norms (4 H); q, k, v and the projection's input (4 A); both sides of GELU (2 F)."""
    heads_width = config.num_attention_heads * config.kv_channels
    values = 4 * config.hidden_size + 4 * heads_width + 2 * config.ffn_hidden_size
    masks = 2 * config.hidden_size * MASK_BYTES if config.hidden_dropout > 0 else 0
    return element_bytes * values + masks + 2 * STATISTICS_BYTES


def _attention_bytes_per_token(config: ModelConfig, element_bytes: int, keeps_attention_scores: bool) -> int:
    """What the attention kernel keeps beside its inputs: the mixture in its own layout (A), and scores or what they are computed from."""
    scores = SCORE_BYTES * config.seq_length if keeps_attention_scores else NORMALIZER_BYTES
    return config.num_attention_heads * (config.kv_channels * element_bytes + scores)
